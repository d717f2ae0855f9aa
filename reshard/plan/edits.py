"""What is asked of names, packing and types, and the checkpoint that it makes of a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Optional

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.edited import EditedCheckpoint, Made
from reshard.checkpoints.formats.dtypes import CAST_TO, CASTABLE
from reshard.errors import CheckpointError, UsageError
from reshard.text.globs import Glob
from reshard.text.messages import listing
from reshard.text.names import as_pattern, is_weight
from reshard.text.near_names import near_names
from reshard.text.report import Report
from reshard.text.wording import quoted


class CastAsked(NamedTuple):
    """A type that is asked for.

    Attributes:
        pattern: of the names, as they are written, of the tensors that get it; None for all weights.
        dtype: the type.
    """

    pattern: Optional[str]
    dtype: str

    @classmethod
    def parse(cls, text: str) -> CastAsked:
        """What ``DTYPE`` or ``GLOB=DTYPE`` asks for.

        Raises:
            UsageError: it names no type that elements can be cast to.
        """
        # A pattern may hold the sign, a type may not.
        pattern, equals, dtype = text.rpartition("=")
        known = {name.lower(): name for name in CAST_TO}
        found = known.get(dtype.strip().lower())
        if found is None or (equals and not pattern):
            near = near_names(dtype, CAST_TO)
            raise UsageError(
                f"--cast {text}: {dtype!r} is no type to cast to",
                hint=f"did you mean {near[0]}?" if near else f"the types are {', '.join(CAST_TO)}",
            )
        return cls(pattern if equals else None, found)


@dataclass(frozen=True)
class Words:
    """The words in which edits were asked for, so that they can be typed again.

    Attributes:
        cast: types.
    """

    cast: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edits:
    """What is asked of names, packing and types.

    Attributes:
        casts: types that are asked for; of those that concern a tensor the last holds.
        words: how it was typed.
    """

    casts: tuple[CastAsked, ...] = ()
    words: Words = field(default=Words(), repr=False, compare=False)

    @cached_property
    def identity(self) -> str:
        """All of it as a text, the same for what gives the same tensors."""
        return repr(self)


def edited(checkpoint: Checkpoint, edits: Edits, report: Report) -> EditedCheckpoint:
    """The checkpoint that edits make of a source.

    Raises:
        InputError: they do not fit it.
    """
    made: Mapping[str, Made] = {name: Made((name,)) for name in checkpoint.tensors}
    kept = {*checkpoint.values(), *checkpoint.without_layout()}
    if edits.casts:
        made = _cast(checkpoint, made, edits.casts)
        _warn_of_uncast(checkpoint, kept, edits.casts, report)
    _check_types(checkpoint, made)
    return EditedCheckpoint(checkpoint, made, kept)


def _check_types(checkpoint: Checkpoint, made: Mapping[str, Made]) -> None:
    """Refuse tensors that would be made of elements of several types.

    Raises:
        CheckpointError: there is one.
    """
    for name, tensor in made.items():
        if tensor.dtype is None and len(tensor.sources) > 1:
            types = {checkpoint.tensors[source].dtype: source for source in tensor.sources}
            if len(types) > 1:
                told = " and ".join(f"{quoted(source)}, which is {dtype}" for dtype, source in types.items())
                raise CheckpointError(
                    f"{quoted(name)} would be made of {told}",
                    parameter=name,
                    hint=f"choose a type with --cast {as_pattern(name)}=DTYPE",
                )


def _cast(checkpoint: Checkpoint, made: Mapping[str, Made], casts: Sequence[CastAsked]) -> dict[str, Made]:
    """The same tensors with the types that are asked for.

    Raises:
        CheckpointError: a pattern fits no tensor, or the elements of one cannot be cast.
    """
    wanted = _Wanted(casts)
    found = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for name, tensor in made.items():
        dtype = wanted.of(name)
        types = {checkpoint.tensors[source].dtype for source in tensor.sources}
        if dtype is None or types == {dtype} or all(_is_no_float(each) for each in types):
            found[name] = tensor
            continue
        for each in types:
            if each != dtype and each not in CASTABLE:
                refused.setdefault((each, dtype), []).append(name)
        found[name] = replace(tensor, dtype=dtype)
    if refused:
        (stored, dtype), names = min(refused.items())
        raise CheckpointError(
            listing(names) + f": elements of type {stored} cannot be cast to {dtype}",
            parameter=names[0],
            hint="name those that are to be cast with --cast 'GLOB=DTYPE'; the others stay as they are",
        )
    wanted.check(found)
    return found


class _Wanted:
    """Which type each tensor is to get."""

    def __init__(self, casts: Sequence[CastAsked]) -> None:
        self._casts = [(None if asked.pattern is None else Glob(asked.pattern), asked.dtype) for asked in casts]
        self._met = [False] * len(casts)

    def of(self, name: str) -> Optional[str]:
        """The type for a tensor of this name; None where none is asked for."""
        found = None
        for number, (glob, dtype) in enumerate(self._casts):
            if is_weight(name) if glob is None else glob.matches(name):
                self._met[number] = True
                found = dtype
        return found

    def check(self, names: Mapping[str, object]) -> None:
        """Refuse patterns that no name fitted: what was meant would silently keep another type.

        Raises:
            CheckpointError: there is one.
        """
        for (glob, dtype), met in zip(self._casts, self._met):
            if not met and glob is not None:
                near = near_names(glob.pattern, names)
                raise CheckpointError(
                    f"--cast {glob.pattern}={dtype}: no tensor that is written has such a name",
                    hint=f"did you mean {' or '.join(map(quoted, near))}?" if near else None,
                )


def _is_no_float(dtype: str) -> bool:
    return "Float" not in dtype


def _warn_of_uncast(checkpoint: Checkpoint, kept: set[str], casts: Sequence[CastAsked], report: Report) -> None:
    """Say which weights keep their type because they are copied as they are."""
    wanted = _Wanted(casts)
    uncast = []
    for name in sorted(kept):
        dtype = wanted.of(name) if is_weight(name) else None
        stored = checkpoint.indexes[checkpoint.holders(name)[0]].tensors[name]
        if dtype is not None and stored.dtype in CASTABLE and stored.dtype != dtype:
            uncast.append(name)
    if uncast:
        report.warn(
            "not cast, because nothing says how they are laid out, so that they are copied as they are: "
            + listing(uncast)
        )
