"""Errors for checkpoints of other forms and tools where a rank tree is required."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterable
from typing import Optional

from reshard.errors import CheckpointError, ReshardError
from reshard.storage import is_directory, leads_to, names_in, store_of
from reshard.text.names import natural_order

_ITERATION = "iteration_"
_ENDINGS = (".safetensors", ".json")
_ITERATION_FILE = r".*-(?:model|opt)-[0-9]{7}-[0-9]{7}\.safetensors"
_UNIFIED_PART = r"(?:part[0-9]+|hyper_param|model-[0-9]{5}-of-[0-9]{5})\.safetensors"
_UNIFIED_MAP = r"param_name_map\.json|.+\.safetensors\.index\.json"

_CHECKPOINT_FILE = (
    r"\.metadata|.+\.distcp|model_world_size_[0-9]+_rank_[0-9]+\.pt|model(-[0-9]{5}-of-[0-9]{5})?\.safetensors|"
    r"shard-[0-9]+-model-[0-9]+-of-[0-9]+\.safetensors|" + _UNIFIED_MAP
)
# Levels of directories that are searched, directories of one level, and those that a message names.
_MAX_LEVELS, _MAX_SEARCHED, _MAX_NAMED = 3, 16, 3

PEFT_ADAPTER = "adapter_model.safetensors"
"""PEFT's file of an adapter's matrices."""

# Names in a directory, what it is, and what to do with it.
_OTHER_TOOLS = (
    (
        r"zero_to_fp32\.py|global_step[0-9]+|.*_(model|optim)_states\.pt",
        "a checkpoint of another tool, DeepSpeed, and is not read",
        "write its weights as safetensors: python zero_to_fp32.py DIR OUT --safe_serialization",
    ),
    (
        r"iter_[0-9]{7,}|mp_rank_[0-9]{2}(_[0-9]{3})*|model_optim_rng\.pt",
        "a checkpoint of another tool, Megatron, and is not read in this format",
        "have Megatron save it with --ckpt-format torch_dist, or export it with Megatron-Bridge",
    ),
    (
        r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt|ocdbt\.process_.+",
        "a checkpoint of another tool, Orbax, and is not read",
        "restore it with Orbax, and save its arrays as safetensors",
    ),
    (
        re.escape(PEFT_ADAPTER),
        "an adapter that PEFT saved, and no model",
        "merge it into its base: reshard merge-lora BASE {quoted} OUT; for its tensors alone, give its file: "
        f"{{directory}}/{PEFT_ADAPTER}",
    ),
)

_VERSION_2 = "a Checkpoint 2.0 directory"
_UNIFIED = "unified (full) weights"


def refuse_other_forms(src: str) -> None:
    """Refuse Checkpoint 2.0 directories and unified weights.

    Args:
        src: an existing file or directory.

    Raises:
        CheckpointError: the source is of such a form.
        ReshardError: the directory cannot be listed.
    """
    form = _form_of_directory(names_in(src)) if is_directory(src) else _form_of_file(src)
    if form is not None:
        raise CheckpointError(
            f"{src}: is {form}, not a tree of ranks",
            file=src,
            hint="pass the whole directory to `reshard convert`, without --src-strategy",
        )


def checkpoint_of_other_tool(directory: str) -> Optional[CheckpointError]:
    """The error for a directory that another tool wrote, by the names in it; None for others."""
    names = _names_in(directory)
    for expression, title, hint in _OTHER_TOOLS:
        if _any(expression, names):
            return CheckpointError(
                f"{directory}: is {title}",
                file=directory,
                hint=hint.format(directory=directory, quoted=shlex.quote(directory)),
            )
    return None


def _form_of_directory(names: list[str]) -> Optional[str]:
    if "latest_checkpointed_iteration.txt" in names or {"metadata.json", "common.json"} <= set(names):
        return _VERSION_2
    files = [name for name in names if name.endswith(_ENDINGS)]
    numbers = [name[len(_ITERATION) :] for name in names if name.startswith(_ITERATION)]
    if any(number.isascii() and number.isdecimal() for number in numbers) or _any(_ITERATION_FILE, files):
        return _VERSION_2
    return _UNIFIED if _any(_UNIFIED_MAP, files) or _any(_UNIFIED_PART, files) else None


def _any(expression: str, names: Iterable[str]) -> bool:
    return any(re.fullmatch(expression, name) for name in names)


def _form_of_file(path: str) -> Optional[str]:
    name = os.path.basename(path)
    if re.fullmatch(_ITERATION_FILE, name):
        return "a file of " + _VERSION_2
    if re.fullmatch(_UNIFIED_MAP, name):
        return "the map of " + _UNIFIED
    if re.fullmatch(_UNIFIED_PART, name):
        return "a part of " + _UNIFIED
    return None


def hint_of_checkpoints_below(directory: str) -> Optional[str]:
    """The hint to use checkpoints of other forms, by names, in directories below one; those of the last steps first."""
    level = [directory]
    for _ in range(_MAX_LEVELS):
        level = [path for place in level for path in _subdirectories(place)][:_MAX_SEARCHED]
        held = [path for path in level if _any(_CHECKPOINT_FILE, _names_in(path))]
        if held:
            return f"did you mean {' or '.join(held[:_MAX_NAMED])}?"
    return None


def _subdirectories(directory: str) -> list[str]:
    # Unreadable directories are skipped: this is only advice.
    with contextlib.suppress(OSError, ReshardError):
        entries = store_of(directory).entries(directory)
        names = natural_order([each.name for each in entries if each.name[0] != "." and leads_to(each.is_dir)])
        numbered = [name for name in names if name[-1].isdigit()]
        return [os.path.join(directory, name) for name in dict.fromkeys([*numbered[::-1], *names])]
    return []


def _names_in(directory: str) -> list[str]:
    """Its files and directories; none of an unreadable one."""
    with contextlib.suppress(ReshardError):
        return names_in(directory)
    return []
