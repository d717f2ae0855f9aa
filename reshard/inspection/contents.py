"""One checkpoint file, and the contents of several, from their headers alone."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from reshard.checkpoints import CheckpointIndex, FileHandles, can_hold, files_alike, read_index
from reshard.checkpoints.formats.dtypes import INT4, MAP_TENSOR, TEXT
from reshard.errors import CheckpointError, ReshardError
from reshard.storage import is_regular_file
from reshard.text.messages import listing
from reshard.text.names import KINDS, Total, kind_of


class Finding(NamedTuple):
    """A finding of an inspection.

    Attributes:
        kind: one word for scripts.
        text: one or a few lines.
        hint: the remedy, or None.
        step: its step, or None.
        refuses: whether conversions refuse such files.
    """

    kind: str
    text: str
    hint: str | None = None
    step: str | None = None
    refuses: bool = False


class InspectedTensor(NamedTuple):
    """An entry of the read files, by name.

    Attributes:
        name: parameter name.
        dtypes: its types; one, unless files differ.
        shapes: shapes of its slices, each once.
        files: number of files that hold it.
        nbytes: bytes of tensor contents in them.
        kind: one of `reshard.text.names.KINDS`.
    """

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    files: int
    nbytes: int
    kind: str


@dataclass(frozen=True)
class InspectedContents:
    """The entries of some checkpoint files, from their headers.

    Attributes:
        stored: all entries by name, in the order of the lowest rank's file.
        sets: the sets of names that files hold, and the ranks of each set.
        formats: formats of the files, without duplicates.
        with_crc: number of files that record a CRC.
        deduplicated: number of files that are marked as de-duplicated.
    """

    stored: tuple[InspectedTensor, ...]
    sets: tuple[tuple[tuple[int, ...], frozenset[str]], ...]
    formats: tuple[str, ...]
    with_crc: int
    deduplicated: int

    def by_dtype(self) -> dict[str, Total]:
        """Names and bytes per type, the largest first."""
        return _totals((dtype, item.nbytes) for item in self.stored for dtype in item.dtypes)

    def by_kind(self) -> dict[str, Total]:
        """Names and bytes per kind, in the order of `KINDS`."""
        totals = _totals((item.kind, item.nbytes) for item in self.stored)
        return {kind: totals[kind] for kind in KINDS if kind in totals}

    def unholdable(self, format: str) -> list[str]:
        """Names of entries that a file of this format cannot hold, without map tensors, which no format holds."""
        return [
            item.name
            for item in self.stored
            if MAP_TENSOR not in item.dtypes and not all(can_hold(format, dtype) for dtype in item.dtypes)
        ]


def contents_of(indexes: Mapping[int, CheckpointIndex]) -> InspectedContents:
    """The entries of some files, given by rank."""
    # Files with equal headers share their tensors and are counted once.
    alike = files_alike(indexes)
    sets: dict[frozenset[str], list[int]] = defaultdict(list)
    entries: dict[str, InspectedTensor] = {}
    all_names = {name for ranks in alike for name in indexes[ranks[0]].tensors}
    for ranks in alike:
        tensors = indexes[ranks[0]].tensors
        sets[frozenset(tensors)] += ranks
        for tensor in tensors.values():
            size = tensor.nbytes * len(ranks)
            entry = entries.get(tensor.name)
            if entry is None:
                kind = kind_of(tensor.name, tensor.elements, all_names)
                merged = InspectedTensor(tensor.name, (tensor.dtype,), (tensor.shape,), len(ranks), size, kind)
            else:
                merged = entry._replace(
                    dtypes=entry.dtypes if tensor.dtype in entry.dtypes else (*entry.dtypes, tensor.dtype),
                    shapes=entry.shapes if tensor.shape in entry.shapes else (*entry.shapes, tensor.shape),
                    files=entry.files + len(ranks),
                    nbytes=entry.nbytes + size,
                )
            entries[tensor.name] = merged
    return InspectedContents(
        tuple(entries.values()),
        tuple(sorted((tuple(sorted(ranks)), names) for names, ranks in sets.items())),
        tuple(sorted({index.format for index in indexes.values()})),
        sum(index.crc is not None for index in indexes.values()),
        sum(index.metadata.get("remove_redundancy") == "True" for index in indexes.values()),
    )


def _totals(items: Iterator[tuple[str, int]]) -> dict[str, Total]:
    totals: dict[str, Total] = {}
    for key, nbytes in items:
        names, size = totals.get(key, (0, 0))
        totals[key] = Total(names + 1, size + nbytes)
    return dict(sorted(totals.items(), key=lambda item: -item[1].bytes))


def conversion_findings(contents: InspectedContents) -> Iterator[Finding]:
    """Findings on text, Int4, map tensors and other special entries, as conversions treat them."""
    of: dict[str, list[str]] = defaultdict(list)
    for item in contents.stored:
        for dtype in item.dtypes:
            of[dtype].append(item.name)
    if of[TEXT]:
        yield Finding(
            "text", listing(of[TEXT], 3) + ": text, which .ckpt targets get unchanged and .safetensors cannot hold"
        )
    if of[INT4]:
        yield Finding("int4", listing(of[INT4], 3) + ": Int4, two values a byte; shapes count the packed bytes")
    if of[MAP_TENSOR]:
        yield Finding(
            "map_tensor",
            listing(of[MAP_TENSOR], 3) + ": map tensors, which have no layout",
            "skip them in conversions with --exclude",
            refuses=True,
        )
    for format in ("ckpt", "safetensors"):
        names = [name for name in contents.unholdable(format) if name not in of[TEXT]]
        if names:
            does = f"of types that .{format} cannot hold; a conversion to it refuses"
            yield Finding("type", listing(names, 3) + f": {does}")
    if contents.deduplicated:
        yield Finding("remove_redundancy", "de-duplicated (remove_redundancy True): each slice is on one rank only")


def inspect_file(path: str) -> CheckpointIndex:
    """The header of a checkpoint file.

    Raises:
        InputError: it is damaged, or not a checkpoint; the message names its kind if that is recognised.
        RetryableError: reading failed.
    """
    with FileHandles() as handles:
        try:
            return read_index(handles, path)
        except CheckpointError as error:
            raise error_by_name(path) or error from error


def refuse_other_files(path: str) -> None:
    """Refuse a file that is not a checkpoint but that another command reads."""
    error = error_by_name(path) if is_regular_file(path) else None
    if error is not None:
        raise error


def error_by_name(path: str) -> CheckpointError | None:
    """The error for a file that is not a checkpoint but that another command reads."""
    from reshard.strategies import read_group_info, read_strategy_file

    with suppress(ReshardError):
        read_group_info(path)
        hint = f"`reshard group-info inspect {shlex.quote(path)}` reads it"
        return CheckpointError(f"{path}: is a group_info file, not a checkpoint", file=path, hint=hint)
    with suppress(ReshardError):
        read_strategy_file(path)
        hint = f"`reshard strategy show {shlex.quote(path)}` reads it; two are compared by `reshard strategy diff A B`"
        return CheckpointError(f"{path}: is a strategy file, not a checkpoint", file=path, hint=hint)
    return None
