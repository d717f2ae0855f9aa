"""The choice of replicas: few files, balanced shares, no superfluous file."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import IncompleteSourceError
from reshard.layout import Layout
from reshard.plan.replicas import ReplicaChoice, choose
from reshard.strategies import Stage, Strategy

NEEDS = st.lists(st.sets(st.integers(0, 9), min_size=1).map(sorted), min_size=1, max_size=12)


def strategy(matrix: tuple[int, ...], tensor_map: tuple[tuple[int, ...], ...], **more: int) -> Strategy:
    layout = Layout(matrix, tensor_map, **more)  # type: ignore[arg-type]
    return Strategy((Stage(0, 0, layout.device_count, {"w": layout}, ("test.ckpt",)),), "test.ckpt")


@given(NEEDS, st.integers(0, 20))
def test_chosen_ranks_meet_every_need_and_are_irredundant(needs: list[list[int]], turn: int) -> None:
    chosen = choose(needs, turn)
    assert list(chosen) == sorted(set(chosen))
    assert all(set(chosen) & set(need) for need in needs)
    for rank in chosen:
        assert any(set(chosen) & set(need) == {rank} for need in needs)


@given(NEEDS)
def test_one_rank_is_read_where_one_suffices(needs: list[list[int]]) -> None:
    everything = [sorted({7, *need}) for need in needs]
    assert len(choose(everything, 0)) == 1


def test_targets_with_equal_needs_alternate_between_replicas() -> None:
    choice = ReplicaChoice(strategy((8,), ((), ())), strategy((8,), ((), ())))
    assert Counter(rank for target in range(8) for rank in choice.ranks(target)) == Counter(range(8))


def test_replicas_of_a_tensor_parallel_slice_share_its_readers() -> None:
    source, target = strategy((2, 4), ((0,), ())), strategy((4, 4), ((0,), ()))
    choice = ReplicaChoice(source, target)
    read = Counter(rank for number in range(16) for rank in choice.ranks(number))
    assert set(read.values()) == {2} and len(read) == 8


def test_optimizer_shards_are_all_needed() -> None:
    source = strategy((2, 4), ((0,), ()), shard_size=-1, shard_step=4)
    choice = ReplicaChoice(source, strategy((4,), ((0,), ())))
    assert choice.ranks(1) == (1, 5)


def test_a_lost_rank_is_replaced_by_its_replica_and_a_lost_slice_is_named() -> None:
    choice = ReplicaChoice(strategy((2, 4), ((0,), ())), strategy((4,), ((0,), ())))
    assert choice.ranks(1) == (1,)
    assert choice.ranks(1, available=[0, 2, 3, 4, 5]) == (5,)
    with pytest.raises(IncompleteSourceError, match=r"w.*ranks 1,5"):
        choice.ranks(1, available=[0, 2, 3, 4])
