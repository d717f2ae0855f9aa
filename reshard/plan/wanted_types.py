"""Requested types, and the tensors that get them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import NamedTuple, Optional

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.edited import Recipe
from reshard.checkpoints.formats.dtypes import CAST_TO, CASTABLE, dtype_named
from reshard.errors import CheckpointError, UsageError
from reshard.text.globs import Glob
from reshard.text.messages import listing
from reshard.text.names import is_weight
from reshard.text.near_names import near_names
from reshard.text.report import Report
from reshard.text.wording import quoted


class CastAsked(NamedTuple):
    """A requested type.

    Attributes:
        pattern: of the names, as they are written, of the tensors that get it; None for all weights.
        dtype: the type.
    """

    pattern: Optional[str]
    dtype: str

    @classmethod
    def parse(cls, text: str) -> CastAsked:
        """The request in ``DTYPE`` or ``GLOB=DTYPE``.

        Raises:
            UsageError: it names no type that elements can be cast to.
        """
        # A pattern may hold the sign, a type may not.
        pattern, equals, dtype = text.rpartition("=")
        found = dtype_named(dtype)
        if equals and not pattern:
            raise UsageError(
                f"--cast {text}: the pattern of names before = is missing", hint=f"for all weights: --cast {dtype}"
            )
        if found is None or found not in CAST_TO:
            raise UsageError(
                f"--cast {text}: {dtype!r} is no type to cast to",
                hint=f"use {', '.join(CAST_TO[:-1])} or {CAST_TO[-1]}; fp32, fp16 and bf16 are short for them",
            )
        return cls(pattern if equals else None, found)


def cast(
    checkpoint: Checkpoint,
    made: Mapping[str, Recipe],
    kept: AbstractSet[str],
    unseen: AbstractSet[str],
    casts: Sequence[CastAsked],
) -> dict[str, Recipe]:
    """The same tensors with the requested types.

    Args:
        checkpoint: the source.
        made: recipes of its tensors.
        kept: names of copied values.
        unseen: names of parameters that only absent ranks hold.
        casts: the requested types.

    Raises:
        CheckpointError: a pattern fits no tensor, or the elements of one cannot be cast.
    """
    wanted = _Wanted(casts, made.keys() | kept | unseen)
    for name in unseen:
        # A pattern that fits a parameter of an absent rank is used.
        wanted.of(name)
    found = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for name, tensor in made.items():
        types = {checkpoint.tensors[source].dtype for source in tensor.sources}
        floating = not all(_is_no_float(each) for each in types)
        dtype = wanted.of(name, floating)
        if dtype is None or types == {dtype} or not floating:
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
            hint="select the tensors to cast: --cast 'GLOB=DTYPE'",
        )
    wanted.check(found)
    return found


def tell_casts(checkpoint: Checkpoint, made: Mapping[str, Recipe], report: Report) -> None:
    """Note the number of tensors per pair of types."""
    counts = Counter(
        (checkpoint.tensors[tensor.sources[0]].dtype, tensor.dtype)
        for tensor in made.values()
        if tensor.dtype is not None
    )
    said = [f"{count} from {stored} to {dtype}" for (stored, dtype), count in sorted(counts.items())]
    report.note("cast: " + (", ".join(said) if said else "nothing, all tensors have the requested types"))


class _Wanted:
    """Which type each tensor is to get."""

    def __init__(self, casts: Sequence[CastAsked], known: AbstractSet[str]) -> None:
        self._known = known
        self._casts = [(None if asked.pattern is None else Glob(asked.pattern), asked.dtype) for asked in casts]
        self._met = [False] * len(casts)

    def of(self, name: str, floating: bool = True) -> Optional[str]:
        """The requested type for a tensor; None without one. Patterns match floating tensors only."""
        found = None
        for number, (glob, dtype) in enumerate(self._casts):
            if is_weight(name, self._known) if glob is None else glob.matches(name):
                self._met[number] |= floating
                found = dtype
        return found

    def check(self, names: Mapping[str, object]) -> None:
        """Refuse patterns that match nothing: tensors would silently keep their types.

        Raises:
            CheckpointError: there is one.
        """
        for (glob, dtype), met in zip(self._casts, self._met):
            if not met and glob is not None:
                others = [name for name in names if glob.matches(name)]
                if others:
                    raise CheckpointError(
                        f"--cast {glob.pattern}={dtype}: only floating numbers are cast, and these are none: "
                        + listing(others),
                        parameter=others[0],
                        hint="leave it out: they stay as they are",
                    )
                near = near_names(glob.pattern, names)
                raise CheckpointError(
                    f"--cast {glob.pattern}={dtype}: matches no tensor of the target",
                    hint=f"did you mean {' or '.join(map(quoted, near))}?" if near else None,
                )


def _is_no_float(dtype: str) -> bool:
    return "Float" not in dtype


def warn_of_uncast(
    checkpoint: Checkpoint,
    made: Mapping[str, Recipe],
    kept: AbstractSet[str],
    casts: Sequence[CastAsked],
    report: Report,
) -> None:
    """Warn of weights that are copied and keep their type."""
    known = made.keys() | kept
    wanted = _Wanted(casts, known)
    uncast = []
    for name in sorted(kept):
        dtype = wanted.of(name) if is_weight(name, known) else None
        stored = checkpoint.indexes[checkpoint.holders(name)[0]].tensors[name]
        if dtype is not None and stored.dtype in CASTABLE and stored.dtype != dtype:
            uncast.append(name)
    if uncast:
        report.warn("copied without cast, because their layout is unknown: " + listing(uncast))
