"""Advice on directories that hold no ranks: checkpoints of other tools, or others in directories below.

Loaded with an error only.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Sequence

from reshard.errors import CheckpointError, ReshardError
from reshard.forms.ranks.naming import UNIFIED_MAP, VLLM_FILE
from reshard.storage import absolute, directories_in, is_directory, names_in
from reshard.text.names import natural_order

PEFT_ADAPTER = "adapter_model.safetensors"
"""PEFT's file of an adapter's matrices."""

_MADE_OF = "convert the Hugging Face directory that it was made of"
# Lines of a directory's sorted names, what it is, and what to do with it.
_OTHER_TOOLS = (
    (
        r"model_optim_rng\.pt",
        "one rank of a checkpoint of Megatron",
        "give the directory of all ranks: {directory}/..",
    ),
    (
        re.escape(PEFT_ADAPTER),
        "an adapter that PEFT saved, and no model",
        "merge it into its base: reshard merge-lora BASE {quoted} OUT; for its tensors alone, give its file: "
        f"{{directory}}/{PEFT_ADAPTER}",
    ),
    *(
        (lines, f"a checkpoint of another tool, {tool}, and is not read", hint)
        for lines, tool, hint in (
            (
                r"zero_to_fp32\.py|global_step[0-9]+|.*_(model|optim)_states\.pt",
                "DeepSpeed",
                "write its weights as safetensors: python zero_to_fp32.py DIR OUT --safe_serialization",
            ),
            (
                r"_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt|ocdbt\.process_.+",
                "Orbax",
                "restore it with Orbax, and save its arrays as safetensors",
            ),
            (VLLM_FILE, "vLLM (sharded_state)", _MADE_OF),
            (r"rank[0-9]+\.engine|config\.json\n(?s:.*\n)?rank0\.safetensors", "TensorRT-LLM", _MADE_OF),
            (
                r".+\.gguf",
                "llama.cpp (GGUF)",
                f"{_MADE_OF}, or what transformers saves of gguf_file=FILE",
            ),
            (r".+\.onnx", "ONNX", "convert the model that it was exported from"),
            (r".+\.nemo", "NeMo", "unpack it with tar -xf FILE: .distcp files in it are of a checkpoint of Megatron"),
            (
                r"saved_model\.pb|.+\.data-[0-9]{5}-of-[0-9]{5}|.+\.(h5|keras|tflite)",
                "TensorFlow",
                "load it there, and save its weights with safetensors.numpy.save_file",
            ),
            (r".+\.npz", "NumPy", "save its arrays: safetensors.numpy.save_file(dict(numpy.load(FILE)), OUT)"),
            (r"\.zarray|\.zgroup|zarr\.json", "zarr", "load its arrays there, and save them as safetensors"),
        )
    ),
)
_CHECKPOINT_FILE = re.compile(
    r"\.metadata|.+\.distcp|model_world_size_[0-9]+_rank_[0-9]+\.pt|model(-[0-9]{5}-of-[0-9]{5})?\.safetensors|"
    rf"shard-[0-9]+-model-[0-9]+-of-[0-9]+\.safetensors|rank_?0|{UNIFIED_MAP}|mp_rank_00(_000){{0,2}}"
)
# Levels of directories that are searched, directories of one level, and those that a message names.
_MAX_LEVELS, _MAX_SEARCHED, _MAX_NAMED = 3, 16, 3


_PYTORCH_ENDINGS = (".bin", ".pt", ".pth")
_MOST_LISTED = 8


def nothing_found(src: str, ranks: Sequence[str], files: Sequence[str], is_rank: bool) -> CheckpointError:
    """The error for a directory without files of ranks.

    Args:
        src: the directory.
        ranks: the names of rank directories in it.
        files: the names of checkpoint files in it.
        is_rank: whether it is named like a rank's directory.
    """
    names = names_in(src)
    # Orbax names the directories of steps as ranks are named here. Models of PyTorch have copies for other tools.
    if not any(name.startswith("pytorch_model") for name in names):
        for place in (src, *(os.path.join(src, name) for name in ranks[:1])):
            other = checkpoint_of_other_tool(place)
            if other is not None:
                return other
    if ranks:
        return CheckpointError(
            f"{src}: its rank directories ({', '.join(ranks[:_MOST_LISTED])}) hold no .ckpt or .safetensors file",
            file=src,
            hint="for files in subdirectories, pass a path with {rank}: 'ckpt/rank_{rank}/*/*.ckpt'",
        )
    if is_rank:
        hint = f"did you mean {os.path.dirname(absolute(src))}?"
    else:
        hint = hint_of_checkpoints_below(src) or (
            "a source is a directory of rank_0/, rank_1/ ... (or rank0/, 0/), one file, a path with {rank} in it as in "
            "'ckpt_dir{rank}/*.ckpt', or a directory of Checkpoint 2.0, unified, Hugging Face or PyTorch weights"
        )
    if files:
        shown = ", ".join(files[:_MOST_LISTED])
        return CheckpointError(f"{src}: holds files ({shown}) but no rank directories", file=src, hint=hint)
    pytorch_files = [name for name in names if name.endswith(_PYTORCH_ENDINGS)]
    if pytorch_files and not hint.startswith("did you mean"):
        return CheckpointError(
            f"{src}: holds PyTorch files ({', '.join(pytorch_files[:_MOST_LISTED])}), which are not read",
            file=src,
            hint="save the model as safetensors first: model.save_pretrained(DIR, safe_serialization=True)",
        )
    if not names:
        hint = "pass one with rank_0/, rank_1/ ..., or one that MindSpore, PyTorch, Megatron or Hugging Face wrote"
        return CheckpointError(f"{src}: is an empty directory", file=src, hint=hint)
    return CheckpointError(f"{src}: holds no checkpoints", file=src, hint=hint)


def checkpoint_of_other_tool(directory: str) -> CheckpointError | None:
    """The error for a directory or file that another tool wrote, by the names in it; None for others."""
    lines = "\n".join(sorted(names_in(directory)) if is_directory(directory) else [os.path.basename(directory)])
    for expression, title, hint in _OTHER_TOOLS:
        if re.search(f"^(?:{expression})$", lines, re.MULTILINE):
            return CheckpointError(
                f"{directory}: is {title}",
                file=directory,
                hint=hint.format(directory=directory, quoted=shlex.quote(directory)),
            )
    return None


def hint_of_checkpoints_below(directory: str) -> str | None:
    """The hint to use checkpoints, by names, in directories below one; those of the last steps first."""
    level = [directory]
    for _ in range(_MAX_LEVELS):
        below: list[str] = []
        for place in level:
            # Unreadable directories are skipped: this is only advice.
            with contextlib.suppress(ReshardError):
                names = natural_order(name for name in directories_in(place) if name[0] != ".")
                numbered = [name for name in names if name[-1].isdigit()]
                below += [os.path.join(place, name) for name in dict.fromkeys([*numbered[::-1], *names])]
        level, named = below[:_MAX_SEARCHED], []
        for path in level:
            with contextlib.suppress(ReshardError):
                named += [path] if any(map(_CHECKPOINT_FILE.fullmatch, names_in(path))) else []
        if named:
            return f"did you mean {' or '.join(named[:_MAX_NAMED])}?"
    return None
