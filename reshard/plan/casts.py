"""Requested types, and the tensors that get them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from reshard.checkpoints.checkpoint import Checkpoint, Recipe
from reshard.checkpoints.formats.dtypes import CAST_TO, CASTABLE, dtype_named
from reshard.errors import CheckpointError, UsageError
from reshard.text.globs import Glob, advice_on_unmatched
from reshard.text.messages import Report, listing
from reshard.text.names import is_weight


class CastRule(NamedTuple):
    """A requested type.

    Attributes:
        pattern: pattern of the written names; None for all weights.
        dtype: the type.
    """

    pattern: str | None
    dtype: str

    @classmethod
    def parse(cls, text: str) -> CastRule:
        """The request in ``DTYPE`` or ``GLOB=DTYPE``.

        Raises:
            UsageError: it names no type that elements can be cast to.
        """
        # A pattern may contain "=", a type may not.
        pattern, equals, dtype = text.rpartition("=")
        known_dtype = dtype_named(dtype)
        if equals and not pattern:
            raise UsageError(
                f"--cast {text}: the pattern of names before = is missing", hint=f"for all weights: --cast {dtype}"
            )
        if known_dtype is None or known_dtype not in CAST_TO:
            hint = f"use {', '.join(CAST_TO[:-1])} or {CAST_TO[-1]}; fp32, fp16 and bf16 are short for them"
            if "*" in text or ":" in text:
                hint += "; for tensors by name: --cast 'GLOB=TYPE'"
            raise UsageError(f"--cast {text}: {dtype!r} is no type to cast to", hint=hint)
        return cls(pattern if equals else None, known_dtype)


def cast(
    checkpoint: Checkpoint,
    recipes: Mapping[str, Recipe],
    values: AbstractSet[str],
    unseen: AbstractSet[str],
    casts: Sequence[CastRule],
    report: Report,
) -> dict[str, Recipe]:
    """The same tensors with the requested types.

    Args:
        values: names of copied values.
        unseen: names of parameters that only absent ranks hold.
        report: gets the number of tensors per pair of types, and a warning of weights that are copied without cast.

    Raises:
        CheckpointError: a pattern fits no tensor, or the elements of one cannot be cast.
    """
    requested = RequestedTypes(casts, recipes.keys() | values | unseen)
    for name in unseen:
        # Marks patterns of an absent rank's parameters as used.
        requested.of(name)
    cast_recipes = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for name, recipe in recipes.items():
        types = {checkpoint.tensors[source].dtype for source in recipe.sources}
        floating = any("Float" in dtype_of_part for dtype_of_part in types)
        dtype = requested.of(name, floating)
        if dtype is None or types == {dtype} or not floating:
            cast_recipes[name] = recipe
            continue
        for dtype_of_part in types:
            if dtype_of_part != dtype and dtype_of_part not in CASTABLE:
                refused.setdefault((dtype_of_part, dtype), []).append(name)
        cast_recipes[name] = recipe._replace(dtype=dtype)
    if refused:
        # Loaded only here: most checkpoints are not quantised.
        from reshard.quantised import looks_quantised, stored_tensors

        (stored, dtype), names = min(refused.items())
        quantised = looks_quantised(stored_tensors(checkpoint))
        raise CheckpointError(
            listing(names) + f": elements of type {stored} cannot be cast to {dtype}",
            parameter=names[0],
            hint=f"for quantised weights: --dequantize {dtype}"
            if quantised
            else "select the tensors to cast: --cast 'GLOB=DTYPE'",
        )
    requested.check(cast_recipes)
    _note_casts(checkpoint, cast_recipes, report)
    _warn_of_uncast(checkpoint, recipes.keys() | values, values, requested, report)
    return cast_recipes


def _note_casts(checkpoint: Checkpoint, recipes: Mapping[str, Recipe], report: Report) -> None:
    counts = Counter(
        ("codes" if source.decoding is not None else source.dtype, recipe.dtype)
        for recipe in recipes.values()
        for source in (checkpoint.tensors[recipe.sources[0]],)
        if recipe.dtype is not None
    )
    parts = [f"{count} from {stored} to {dtype}" for (stored, dtype), count in sorted(counts.items())]
    report.note("cast: " + (", ".join(parts) if parts else "nothing, all tensors have the requested types"))


class RequestedTypes:
    """The requested type of each tensor."""

    def __init__(self, casts: Sequence[CastRule], names: AbstractSet[str]) -> None:
        self._names = names
        self._casts = [(None if rule.pattern is None else Glob(rule.pattern), rule.dtype) for rule in casts]
        self._matched = [False] * len(casts)

    def of(self, name: str, floating: bool = True) -> str | None:
        """The requested type for a tensor; None without one. Patterns match floating tensors only."""
        requested = None
        for number, (glob, dtype) in enumerate(self._casts):
            if is_weight(name, self._names) if glob is None else glob.matches(name):
                self._matched[number] |= floating
                requested = dtype
        return requested

    def check(self, names: Mapping[str, object]) -> None:
        """Refuse unused patterns: tensors would silently keep their types.

        Raises:
            CheckpointError: a pattern is unused.
        """
        for (glob, dtype), matched in zip(self._casts, self._matched):
            if not matched and glob is not None:
                not_floating = [name for name in names if glob.matches(name)]
                if not_floating:
                    raise CheckpointError(
                        f"--cast {glob.pattern}={dtype}: only floating-point tensors are cast, and these are not: "
                        + listing(not_floating),
                        parameter=not_floating[0],
                        hint="remove this --cast: these tensors are copied unchanged",
                    )
                raise CheckpointError(
                    f"--cast {glob.pattern}={dtype}: matches no tensor of the target; "
                    + advice_on_unmatched(glob.pattern, names),
                )


def _warn_of_uncast(
    checkpoint: Checkpoint,
    names: AbstractSet[str],
    values: AbstractSet[str],
    requested: RequestedTypes,
    report: Report,
) -> None:
    """Warn of weights among values, which are copied and keep their type."""
    uncast = []
    for name in sorted(values):
        dtype = requested.of(name) if is_weight(name, names) else None
        stored = checkpoint.indexes[checkpoint.holders(name)[0]].tensors[name]
        if dtype is not None and stored.dtype in CASTABLE and stored.dtype != dtype:
            uncast.append(name)
    if uncast:
        report.warn("copied without cast, because their layout is unknown: " + listing(uncast))
