"""Optimizer state in legacy trees: which tensor, or which run of a flat buffer, belongs to which parameter of a rank.

Neither has names. The plain optimizer numbers its tensors by group, each in the order of the model's parameters. The
distributed optimizer's file has flat buffers, see `buckets`. Shapes and lengths are compared here; that every master
is its weight, once it is cast, is compared later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.checkpoints.formats.archives import Archive, Elements, c_strides, is_tensor, plain_tensor
from reshard.checkpoints.formats.dtypes import FROM_TORCH, ITEM_SIZES
from reshard.checkpoints.formats.pickles import Global
from reshard.forms.megatron.buckets import places_by_size
from reshard.forms.megatron.keys import EMBEDDING, OUTPUT
from reshard.forms.megatron.placing import TensorPart, is_decayed, is_of_expert
from reshard.forms.recorded import ProblemError

MASTER = "param"
KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "param": MASTER, "master_param": MASTER}
"""Names of state in files, and in `optimizer.state.KIND.KEY`."""

_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
_NO_STATE = frozenset({"step", "numel_unpadded"})
HALF = frozenset({"Float16", "BFloat16"})


class Owner(NamedTuple):
    """A parameter of a rank, which the optimizer has state of.

    Attributes:
        chunk: the number of its model chunk.
        name: its live name.
        elements: where it is stored.
        parts: the boxes that it is.
        shared: stages of the pipeline share it.
    """

    chunk: int
    name: str
    elements: Elements
    parts: Sequence[TensorPart]
    shared: bool


class State(NamedTuple):
    """State of a parameter, in its shape: ``kind`` is one of the values of `KINDS`."""

    owner: Owner
    kind: str
    elements: Elements


class Plain(NamedTuple):
    """A group of parameters of a plain optimizer.

    Attributes:
        group: its entry in ``param_groups``.
        state: per parameter its tensors by kind.
        masters: FP32 copies of its parameters of 16 bits, in order.
    """

    group: Mapping[str, Any]
    state: Sequence[Mapping[str, Elements]]
    masters: Sequence[Elements]


class JoinedBuffer(NamedTuple):
    """All buckets of a flat buffer of a distributed optimizer, joined.

    Attributes:
        dtype: type of its parameters.
        tensors: by kind.
    """

    dtype: str
    tensors: Mapping[str, Elements]


def groups_of(archive: Archive, optimizer: Mapping[str, Any]) -> list[Plain]:
    """The groups of a plain optimizer; empty for one whose state is in a file of its own.

    Raises:
        ProblemError: the state is none that is read.
    """
    inner = optimizer.get("optimizer", optimizer)
    groups, states = (inner.get(key) for key in ("param_groups", "state")) if isinstance(inner, dict) else (None, None)
    if not isinstance(groups, list) or not isinstance(states, dict) or not states:
        return []
    masters: Any = next((optimizer[key] for key in _MASTERS if key in optimizer), [[]] * len(groups))
    if not isinstance(masters, list) or len(masters) != len(groups):
        raise ProblemError("has FP32 parameters for other groups than it has")
    result = []
    for group, of_group in zip(groups, masters):
        numbers = group.get("params") if isinstance(group, dict) else None
        if not isinstance(numbers, list) or not isinstance(of_group, list):
            raise ProblemError("has a group without a list of parameters")
        tensors = []
        for number in numbers:
            of_parameter = states.get(number)
            if not isinstance(of_parameter, dict):
                raise ProblemError(f"has no state of its parameter {number}")
            tensors.append({KINDS[kind]: archive.tensor(each) for kind, each in _read(of_parameter)})
        result.append(Plain(group, tensors, [archive.tensor(each) for each in of_group]))
    return result


def _read(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """The state of a parameter or a buffer that is read, with its kind."""
    for kind, value in state.items():
        value = plain_tensor(value)
        if kind in KINDS and is_tensor(value):
            yield kind, value
        elif kind not in _NO_STATE:
            raise ProblemError(f"has state called {kind!r}, which is not read")


def flat_buffers(archive: Archive, state: Any) -> list[list[JoinedBuffer] | None]:
    """The buffers of each optimizer in a file of a distributed optimizer; None for one that another rank saves.

    Raises:
        ProblemError: the file holds something else.
    """
    optimizers = state if isinstance(state, list) else [state]
    return [None if each is None else _buffers_of(archive, each) for each in optimizers]


def _buffers_of(archive: Archive, state: Any) -> list[JoinedBuffer]:
    if not isinstance(state, dict) or state.get("buckets_coalesced") is not True:
        raise ProblemError(
            "has buckets that are not joined, as Megatron saved them before 2024: load it and save it again"
        )
    buffers = []
    for number in sorted(key for key in state if type(key) is int):
        of_buffer = state[number]
        for dtypes, tensors in of_buffer.items() if isinstance(of_buffer, dict) else ():
            dtype = dtypes[0] if isinstance(dtypes, tuple) and dtypes else dtypes
            name = FROM_TORCH.get(dtype.name) if isinstance(dtype, Global) else None
            if name is None or not isinstance(tensors, dict):
                raise ProblemError("has a buffer that is none of parameters of one type")
            read = {KINDS[kind]: archive.tensor(each) for kind, each in _read(tensors)}
            if any(len(each.shape) != 1 or not each.in_order for each in read.values()):
                raise ProblemError("has a buffer that is not flat")
            if len({each.shape for each in read.values()}) != 1:
                raise ProblemError("has buffers of different sizes for one set of parameters")
            buffers.append(JoinedBuffer(name, read))
    return buffers


def states_of_groups(optimizers: Sequence[Sequence[Plain]], owners: Sequence[Owner]) -> Iterator[State]:
    """The state of every parameter in the groups of plain optimizers.

    Raises:
        ProblemError: groups are not those of these parameters.
    """
    groups = [group for optimizer in optimizers for group in optimizer]
    left = [*owners]
    for group in groups:
        belong = [_is_in(owner, group.group, [each.group for each in groups]) for owner in left]
        mine = [owner for owner, belongs in zip(left, belong) if belongs]
        left = [owner for owner, belongs in zip(left, belong) if not belongs]
        if len(mine) != len(group.state):
            raise ProblemError(
                f"has a group of {len(group.state)} parameters, and {len(mine)} in the model belong to it"
            )
        halves = [owner for owner in mine if owner.elements.dtype in HALF]
        if mine and not group.masters:
            raise ProblemError("has a group without FP32 parameters, which would show whose state is whose")
        if len(group.masters) != len(halves):
            raise ProblemError(f"has {len(group.masters)} FP32 parameters of a group, and {len(halves)} in the model")
        found = [State(owner, kind, each) for owner, of in zip(mine, group.state) for kind, each in of.items()]
        found += [State(owner, MASTER, each) for owner, each in zip(halves, group.masters)]
        for state in found:
            if state.elements.shape != state.owner.elements.shape:
                raise ProblemError(
                    f"has state of shape {list(state.elements.shape)} where {state.owner.name!r} of shape "
                    f"{list(state.owner.elements.shape)} is expected"
                )
            yield state
    if left:
        raise ProblemError(f"has no group with {left[0].name!r}")


def _is_in(owner: Owner, group: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a parameter belongs to a group, by the properties in which its groups differ."""
    properties = {
        "wd_mult": float(is_decayed(owner.name, owner.elements.shape)),
        "is_expert_parallel": is_of_expert(owner.name),
        "is_decoupled_lr": owner.name in (EMBEDDING, OUTPUT),
    }
    for name, value in properties.items():
        if len({bool(each.get(name)) for each in groups}) > 1 and bool(group.get(name)) != bool(value):
            return False
    return True


def states_of_buffers(
    optimizers: Sequence[Sequence[JoinedBuffer] | None], owners: Sequence[Owner], bucket_sizes: Sequence[int | None]
) -> Iterator[State]:
    """The state of every parameter in the flat buffers of a distributed optimizer.

    Args:
        optimizers: the buffers of each: of all parameters, or first of those of no expert and then of experts.
        owners: the parameters of the rank, in order, chunk by chunk.
        bucket_sizes: elements from which on a bucket is full, to be tried first; see `places_by_size`.

    Raises:
        ProblemError: buffers are not those of these parameters.
    """
    if len(optimizers) > 2:
        raise ProblemError(f"is made of {len(optimizers)} optimizers, and one or two are read")
    for number, buffers in enumerate(optimizers):
        if buffers is None:
            continue
        mine = [each for each in owners if len(optimizers) == 1 or is_of_expert(each.name) == bool(number)]
        sets = _sets(mine)
        if len(sets) != len(buffers):
            raise ProblemError(f"has {len(buffers)} buffers, and the model's parameters make {len(sets)}")
        for of_buffer, buffer in zip(sets, buffers):
            yield from _in_buffer(of_buffer, buffer, bucket_sizes)


def _sets(owners: Sequence[Owner]) -> list[list[Owner]]:
    """Parameters of one chunk and type, as buffers hold them: the last one first."""
    sets: dict[tuple[int, str], list[Owner]] = {}
    for owner in owners:
        sets.setdefault((owner.chunk, owner.elements.dtype), []).append(owner)
    return [each[::-1] for each in sets.values()]


def _in_buffer(owners: Sequence[Owner], buffer: JoinedBuffer, bucket_sizes: Sequence[int | None]) -> Iterator[State]:
    if owners[0].elements.dtype != buffer.dtype:
        raise ProblemError(f"has a buffer of {buffer.dtype} parameters where {owners[0].elements.dtype} are expected")
    (size,) = next(iter(buffer.tensors.values())).shape if buffer.tensors else (0,)
    lengths = [math.prod(owner.elements.shape) for owner in owners]
    alone = [number for number, owner in enumerate(owners) if owner.shared]
    places = places_by_size(lengths, size, alone, bucket_sizes)
    if places is None:
        raise ProblemError(
            f"has a buffer of {size} elements, and {len(lengths)} parameters of {sum(lengths)} do not lie in it in the "
            "order of the model"
        )
    for owner, place in zip(owners, places):
        shape = owner.elements.shape
        for kind, flat in buffer.tensors.items():
            offset = flat.offset + place.start * ITEM_SIZES[flat.dtype]
            yield State(owner, kind, flat._replace(shape=shape, strides=c_strides(shape), offset=offset))
