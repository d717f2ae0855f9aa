"""suggest: the commands for the usual aims with a checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from reshard.asked import Source, words_of
from reshard.cli import options
from reshard.cli.command import argument, command, option
from reshard.cli.output import echo_json, fill, is_json, say
from reshard.defaults import MAX_DEVICES
from reshard.text.messages import byte_size, one_line, plural, step_words

if TYPE_CHECKING:
    from reshard.inspection.suggestions import Suggestions

# Columns of a line, in a terminal and in a file.
_MAX_COLUMNS = 80


@command(
    "suggest",
    """
reshard suggest ckpt/
reshard suggest ckpt/ --devices 16
reshard suggest ckpt/ --src-strategy src.ckpt
""",
)
@argument("src")
@option(
    "Target",
    "--devices",
    type=click.IntRange(min=1, max=MAX_DEVICES),
    metavar="N",
    show_default="a placeholder",
    help="Number of devices of the next cluster.",
)
@options.group(Source, *options.STORED, path="src", strategy={"names": ("--src-strategy", "--strategy")})
@options.json_output
@options.common
def suggest(source: Source, devices: int | None) -> None:
    """Print the commands for the usual aims with the checkpoint SRC of any form.

    The aims are another cluster size, Hugging Face for inference, lost ranks, MindSpore, PyTorch and quantised
    weights. Only names, headers, strategy files and config.json in SRC and the directory above are read. A
    strategy is used if it is the only one there that fits the headers, or if the conversion that wrote SRC
    recorded it; the first command checks it. Values that only you have are placeholders in capitals. The output is a
    shell script.
    """
    from reshard.inspection.contents import refuse_other_files
    from reshard.inspection.suggestions import suggest as suggestions_of
    from reshard.storage.registry import endpoint

    refuse_other_files(source.path)
    words = [part for word in words_of(source, options.STORED[1:]) for part in word.split("=", 1)]
    service = endpoint()
    words += [] if service is None else ["--endpoint-url", service]
    suggestions = suggestions_of(source, devices, words)
    if is_json():
        echo_json(_json(suggestions))
    else:
        _show(suggestions)


def _json(suggestions: Suggestions) -> dict[str, object]:
    inspected, model = suggestions.inspected, suggestions.model
    return {
        "source": inspected.path,
        "form": inspected.form.name,
        "step": inspected.shown.step,
        "files": len(inspected.shown.files),
        "complete": inspected.shown.complete,
        "strategy": suggestions.strategy,
        "strategies": [
            {"path": each.path, "devices": each.device_count, "parameters": len(each.parameters)}
            for each in suggestions.beside
        ],
        "model": None if model.config is None else {"config": model.config.path, "type": model.type},
        "names": model.side,
        "problems": [{"text": each.text, "hint": each.hint} for each in suggestions.problems if not each.level],
        "suggestions": suggestions.items,
    }


def _show(suggestions: Suggestions) -> None:
    """A shell script with comments."""
    inspected, model = suggestions.inspected, suggestions.model
    shown = inspected.shown
    step = "" if shown.step is None else f"{step_words(shown.step)}, "
    files = f"{plural(len(shown.files), 'file')}, {byte_size(shown.nbytes)}"
    _comment(f"{inspected.path}: {inspected.form.name}, {step}{files}")
    if suggestions.strategy is not None:
        _comment(f"strategy: {suggestions.strategy}")
        if suggestions.found_by is not None:
            _comment(f"  {suggestions.found_by}; the first command tests it")
    if model.config is not None:
        _comment(f"model: {model.type or 'unknown type'} ({model.config.path})")
    for problem in suggestions.problems:
        if not problem.level:
            _comment(f"problem: {problem.text}")
            if problem.hint is not None:
                _comment(f"  {problem.hint}")
    placeholders: dict[str, str] = {}
    for item in suggestions.items:
        say("")
        _comment(item.title)
        for each in item.missing:
            if each.placeholder is None:
                _comment(f"  {each.text}")
            else:
                placeholders.setdefault(each.placeholder, each.text)
        say(_shell_command(item.command))
    if placeholders:
        say("\n# Replace:")
        for placeholder, text in placeholders.items():
            _comment(f"  {placeholder}: {text}")
    if any("convert" in item.command for item in suggestions.items):
        say("\n# plan instead of convert checks a conversion and writes nothing")


def _comment(text: str) -> None:
    indent = "# " + " " * (len(text) - len(text.lstrip()))
    for line in text.split("\n"):
        say("\n".join(fill(indent + one_line(line.strip()), _MAX_COLUMNS, indent + "  ")))


def _shell_command(words: Sequence[str]) -> str:
    """A command for pasting; a long one has each option on a line."""
    if len(shlex.join(words)) <= _MAX_COLUMNS:
        return shlex.join(words)
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n    ".join(map(shlex.join, lines))
