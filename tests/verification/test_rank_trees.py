"""The second reading of legacy trees of Megatron, whose places are computed without the form's reader."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.asked import Source as Asked
from reshard.checkpoints import FileHandles
from reshard.forms.megatron.stages import stages_of
from reshard.forms.registry import form_named
from reshard.forms.request import Means, Request
from reshard.strategies import Strategy
from reshard.text.messages import Report
from reshard.verification.boxes import shape_of, whole_box
from reshard.verification.rank_parts import layers_of
from reshard.verification.rank_trees import read_tree
from reshard.verification.stored import SliceSet, Source, StoredTensor, stored_source
from tests.corpus_mcore import McoreCase, mcore_cases

CASES = [case for case in mcore_cases("legacy") if case.expected["expect"] == "convert"]


def read(case: McoreCase, handles: FileHandles) -> Source:
    form = form_named("megatron")
    return stored_source(
        form.read(Request.of_source(Asked(str(case.directory)), form), Means(handles, Report())), Strategy.none()
    )


def elements(source: Source, handles: FileHandles) -> dict[str, tuple[object, ...]]:
    """Type, shape and elements of each tensor."""
    return {
        name: (each.dtype, each.shape, each.read(whole_box(each.shape), handles).tobytes())
        for name, each in source.tensors.items()
    }


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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_readings_of_a_tree_are_equal(case: McoreCase) -> None:
    with FileHandles() as handles, FileHandles() as others:
        expected = read(case, handles)
        source = read_tree(read(case, others), others)
        assert elements(source, others) == elements(expected, handles)
        assert source.values == expected.values


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mistakes_of_the_reader_are_none_of_the_second_reading(case: McoreCase) -> None:
    """But for masters, which are compared with weights."""
    with FileHandles() as handles:
        expected = elements(read(case, handles), handles)
        source = read(case, handles)
        wrong = {
            name: moved(each)
            for name, each in source.tensors.items()
            if isinstance(each, StoredTensor) and not name.startswith("optimizer.state.param.")
        }
        others = {name: each for name, each in wrong.items() if each is not None}
        assert others
        source = replace(source, tensors={**source.tensors, **others})
        assert elements(read_tree(source, handles), handles) == expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_the_reader_lacks_is_there(case: McoreCase) -> None:
    with FileHandles() as handles:
        source = read(case, handles)
        masters = {name: each for name, each in source.tensors.items() if name.startswith("optimizer.state.param.")}
        assert read_tree(replace(source, tensors=masters, values={}), handles).names == source.names


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
    expected = stages_of(args, ranks, chunks)
    numbers = layers_of(args, ranks, chunks, args["num_layers"])
    assert {place: tuple(each) for place, each in numbers.items()} == {
        (rank, chunk): layers for rank, of_rank in enumerate(expected) for chunk, layers in enumerate(of_rank)
    }
