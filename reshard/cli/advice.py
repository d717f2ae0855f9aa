"""Advice on mistyped names: replacements and similar names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Optional

from reshard.text.near_names import near_names

# Options of MindSpore and MindFormers with a counterpart here.
SPELLINGS = {
    "src-checkpoint": "src",
    "src-checkpoint-dir": "src",
    "src-checkpoints-dir": "src",
    "dst-checkpoint": "dst",
    "dst-checkpoint-dir": "dst",
    "dst-checkpoints-dir": "dst",
    "src-strategy-file": "src-strategy",
    "src-strategy-dir": "src-strategy",
    "dst-strategy-file": "dst-strategy",
    "dst-strategy-dir": "dst-strategy",
    "transform-rank": "rank",
}

# Options of their scripts that mean something else than any option here.
_ELSEWHERE = {
    "--world-size": "Not needed: strategies contain the number of ranks.",
    "--device-num": "Not needed: strategies contain the number of ranks.",
    "--npu-num-per-node": "Not needed: which machine writes which ranks is free; see convert --shard I/N.",
    "--rank-id": (
        "The I-th of N processes takes its part of the target ranks with convert --shard I/N; "
        "by-rank RANK converts one target rank."
    ),
    "--transform-process-num": (
        "One process uses all CPUs (limit: --jobs N); "
        "several processes, on one machine or many, divide the work with convert --shard I/N."
    ),
    "--transform-by-rank": "For one target rank use the command by-rank.",
    "--process-num": "Use --jobs N for the number of CPUs.",
    "--max-process-num": "Use --jobs N for the number of CPUs.",
    "--ckpt-prefix": "It is --prefix here.",
    "--output-format": "It is --format here.",
}

# Options that a command deliberately lacks.
_BESIDE = {
    ("merge-lora", "--cast"): "Merge first, then cast: convert OUT OTHER --cast DTYPE.",
    ("merge-lora", "--names"): "Merge first, then give other names: convert OUT OTHER --names TABLE.",
    ("merge-lora", "--rename"): "Merge first, then give other names: convert OUT OTHER --rename OLD=NEW.",
}

# Commands under other names.
_COMMANDS = {
    "transform": "convert",
    "merge": "merge-pipeline",
    "show": "strategy show",
    "compare": "diff",
    "dry-run": "plan",
}


def spelling(name: str) -> str:
    """An option's or command's name as it is here: hyphens for underscores, and MindSpore's own names."""
    name = name.replace("_", "-")
    return SPELLINGS.get(name, name)


def nearest(typed: str, names: Iterable[str]) -> str:
    """`` Did you mean ...?`` with similar names, or an empty text."""
    candidates = near_names(typed, names)
    return f" Did you mean {' or '.join(candidates)}?" if candidates else ""


def on_command(typed: str, names: Iterable[str]) -> str:
    """The probable command for one that does not exist; None without a guess."""
    return f" Did you mean {_COMMANDS[typed]}?" if typed in _COMMANDS else nearest(typed, names)


def on_option(command: Optional[str], typed: str, options: Sequence[str], commands: Sequence[str]) -> str:
    """The replacement of an unknown option.

    Args:
        command: the command.
        typed: the option, in this project's spelling.
        options: the command's options.
        commands: the commands that have it.
    """
    if command is not None and (command, typed) in _BESIDE:
        return f" {_BESIDE[command, typed]}"
    if typed in _ELSEWHERE:
        return f" {_ELSEWHERE[typed]}"
    owners = f" It is an option of {', '.join(commands)}." if commands else ""
    return nearest(typed, options) + owners
