"""The second arithmetic of legacy trees of Megatron: wrong boxes of weights and of moments are found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.asked import Source as Asked
from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.archives import ArchiveEntry, Elements
from reshard.execute import Progress
from reshard.forms.form import ReadRequest
from reshard.forms.megatron.stages import stages_of
from reshard.forms.registry import form_named
from reshard.strategies import Strategy
from reshard.text.messages import Report
from reshard.verification.boxes import shape_of
from reshard.verification.rank_parts import layers_of
from reshard.verification.rank_trees import misplaced
from reshard.verification.reading import Means
from reshard.verification.stored import SliceSet, Source, StoredTensor, stored_source
from tests.corpus_mcore import McoreCase, mcore_cases

CASES = [case for case in mcore_cases("legacy") if case.expected["expect"] == "convert"]


def read(directory: Path, handles: FileHandles) -> Source:
    form = form_named("megatron")
    return stored_source(form.read(ReadRequest(Asked(str(directory)), handles, Report())), Strategy.none())


def differing(source: Source, handles: FileHandles) -> set[str | None]:
    means = Means(handles, 1, 1 << 20, Progress())
    return {each.parameter for each in misplaced(source, [*source.tensors], means, Report())}


def moved(tensor: StoredTensor) -> StoredTensor | None:
    """A tensor with the parts of files in each other's place; None where it has no two of one shape."""
    (slices,) = tensor.slice_sets
    files_of = dict(slices.files_of)
    for box, files in slices.files_of.items():
        for other, of_other in slices.files_of.items():
            if box != other and shape_of(box) == shape_of(other) and files != of_other:
                files_of.update({box: of_other, other: files})
                return replace(tensor, slice_sets=(SliceSet(slices.number, files_of),))
    return None


def mistakes(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """A mistake for every tensor: its name, and all tensors with the mistake."""
    for name, tensor in source.tensors.items():
        wrong = moved(tensor) if isinstance(tensor, StoredTensor) else None
        if wrong is not None and not name.startswith("optimizer.state.param."):
            yield name, {**source.tensors, name: wrong}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_of_ranks_in_each_others_place_are_found(case: McoreCase) -> None:
    with FileHandles() as handles:
        source = read(case.directory, handles)
        assert not differing(source, handles)
        for name, tensors in mistakes(source):
            assert differing(replace(source, tensors=tensors), handles) == {name}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layers_in_each_others_place_are_found(case: McoreCase) -> None:
    with FileHandles() as handles:
        source = read(case.directory, handles)
        for tail in ("mlp.router.weight", "self_attention.linear_proj.weight"):
            first, second = (f"decoder.layers.{layer}.{tail}" for layer in (0, 1))
            if {first, second} <= source.tensors.keys():
                tensors = {**source.tensors, first: source.tensors[second], second: source.tensors[first]}
                assert differing(replace(source, tensors=tensors), handles) == {first, second}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_not_read_is_missed(case: McoreCase) -> None:
    with FileHandles() as handles:
        source = read(case.directory, handles)
        for name in source.tensors:
            tensors = {each: tensor for each, tensor in source.tensors.items() if each != name}
            assert name in differing(replace(source, tensors=tensors), handles)
        if source.values:
            assert differing(replace(source, values={}), handles) == {"global_step"}


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_moments_in_each_others_place_are_found(case: McoreCase, kind: str) -> None:
    with FileHandles() as handles:
        source = read(case.directory, handles)
        first, second = (f"optimizer.state.{kind}.decoder.layers.{layer}.mlp.router.weight" for layer in (0, 1))
        if {first, second} <= source.tensors.keys():
            tensors = {**source.tensors, first: source.tensors[second], second: source.tensors[first]}
            assert differing(replace(source, tensors=tensors), handles) == {first, second}


@given(
    ranks=st.integers(1, 4),
    chunks=st.integers(1, 3),
    per_chunk=st.integers(1, 3),
    empty=st.sets(st.integers(0, 35), max_size=4),
    kind=st.sampled_from(["even", "dualpipev", "first", "last", "loss", "list"]),
)
def test_layers_have_the_numbers_that_the_reader_gives_them(
    ranks: int, chunks: int, per_chunk: int, empty: set[int], kind: str
) -> None:
    chunks = {"dualpipev": 2, "list": 1}.get(kind, chunks)
    count = ranks * chunks * per_chunk
    args: dict[str, Any] = {"num_layers": count}
    if kind in ("even", "dualpipev", "list"):
        args["noop_layers"] = ",".join(str(layer) for layer in empty if layer < count) or None
    if kind == "dualpipev":
        args["schedules_method"] = kind
    elif kind == "list":
        listed = [per_chunk + number for number in range(ranks)]
        args.update(num_layer_list=listed, num_layers=sum(listed))
    elif kind in ("first", "last") and ranks > 1:
        args.update({f"decoder_{kind}_pipeline_num_layers": 2 * chunks, "num_layers": count + (2 - per_chunk) * chunks})
    elif kind == "loss":
        args.update(account_for_loss_in_pipeline_split=True, num_layers=count - 1)
    expected = stages_of(args, ranks, chunks).chunks
    elements = Elements("BFloat16", (), (), 0, ArchiveEntry(0, 2, 0))
    held = {
        (rank, chunk): {
            f"decoder.layers.{local}.mlp.linear_fc1.weight": elements
            for local, layer in enumerate(layers)
            if layer is not None
        }
        for rank, of_rank in enumerate(expected)
        for chunk, layers in enumerate(of_rank)
    }
    numbers = layers_of(args, ranks, held)
    assert {place: tuple(each) for place, each in numbers.items()} == {
        (rank, chunk): layers for rank, of_rank in enumerate(expected) for chunk, layers in enumerate(of_rank)
    }
