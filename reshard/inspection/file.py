"""What is in one checkpoint file, or what else a file is."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass
from typing import Optional

from reshard.checkpoints import CheckpointIndex, Decryption, FileHandles, read_index
from reshard.errors import CheckpointError, ReshardError
from reshard.inspection.contents import Contents, Finding, contents_of, conversion_findings


@dataclass(frozen=True)
class InspectedFile:
    """A checkpoint file.

    Attributes:
        index: what is in it.
        contents: the same added up.
        findings: what a conversion does with it.
    """

    index: CheckpointIndex
    contents: Contents
    findings: tuple[Finding, ...]


def inspect_file(path: str, decryption: Optional[Decryption] = None) -> InspectedFile:
    """What is in a checkpoint file, from its headers.

    Args:
        path: the file.
        decryption: the key, where it is encrypted.

    Raises:
        InputError: it is damaged, or none; says what it is instead where that can be told.
        RetryableError: reading failed.
    """
    with FileHandles(decryption=decryption) as handles:
        try:
            index = read_index(handles, path)
        except CheckpointError as error:
            raise told_by_name(path) or error from error
    contents = contents_of({0: index})
    return InspectedFile(index, contents, tuple(conversion_findings(contents)))


def told_by_name(path: str) -> Optional[CheckpointError]:
    """The error for a file that is no checkpoint and that another command reads."""
    from reshard.strategies import read_group_info, read_strategy_file

    with suppress(ReshardError):
        read_group_info(path)
        hint = f"`reshard group-info inspect {shlex.quote(path)}` reads it"
        return CheckpointError(f"{path}: is a group_info file, not a checkpoint", file=path, hint=hint)
    with suppress(ReshardError):
        read_strategy_file(path)
        hint = f"`reshard strategy show {shlex.quote(path)}` reads it"
        return CheckpointError(f"{path}: is a strategy file, not a checkpoint", file=path, hint=hint)
    return None
