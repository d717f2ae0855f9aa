"""What MindFormers' ``resume_training`` looks for in a tree of rank directories, beside the checkpoints.

It begins with what ``rank_{r}/meta.json`` names, the smallest epoch and step of all ranks, and takes every rank's
file by putting its number in the place of another's behind ``_rank_``. Without meta.json it goes by file times,
and for safetensors it fails.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from typing import Optional

from reshard.checkpoints.rank_tree.steps import parse_stem
from reshard.target.form import FinishingFile

META_NAME = "meta.json"
_DIRECTORY = re.compile(r"rank_([0-9]+)")
_RANK = re.compile(r"_rank_([0-9]+)")


def resume_files(names: Sequence[str]) -> list[FinishingFile]:
    """A meta.json for every rank, or nothing where ``resume_training`` takes no files of such names.

    Args:
        names: the file of every rank, relative to the tree.
    """
    found = []
    for name in names:
        content = meta_json(name)
        if content is None:
            return []
        found.append(FinishingFile(f"{os.path.dirname(name)}/{META_NAME}", functools.partial(list, [content])))
    return found


def meta_json(name: str) -> Optional[bytes]:
    """The content of the meta.json beside a checkpoint file, or None where ``resume_training`` takes no such file.

    Args:
        name: the file, relative to the tree: ``rank_3/llama_rank_3-1_200.ckpt``.
    """
    directory, file = os.path.split(name)
    stem, ending = os.path.splitext(file)
    prefix, step = parse_stem(stem)
    own, shown = _DIRECTORY.fullmatch(directory), _RANK.search(prefix)
    # Behind the step nothing may stand, such as the mark of a save at a fault.
    if step is None or own is None or shown is None or own[1] != shown[1] or file != f"{prefix}-{step}{ending}":
        return None
    said = {"last_epoch": step.epoch, "last_step": step.step, "last_ckpt_file": file}
    return (json.dumps(said) + "\n").encode()
