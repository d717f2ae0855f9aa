"""Cutting files into parts: every byte is in one part, and where files are cut depends on sizes alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints import Data, Literal
from reshard.checkpoints.checkpoint import StoredSlice
from reshard.checkpoints.formats.output import OutputLayout, OutputTensor, lay_out_ckpt, lay_out_safetensors
from reshard.execute import parts
from reshard.execute.parts import Segment, TensorShare, parts_of
from reshard.layout import Box
from reshard.plan.pieces import Piece, TargetFile, TargetTensor
from tests.layouts import examples

ITEM = 4


def target(number: int, boxes: Sequence[tuple[Box, Box]], format: str, record: int) -> TargetFile:
    """A file of Float32 boxes, each of a stored tensor given by its box."""
    tensors = [
        TargetTensor(f"w{place}", ITEM, box, (Piece(StoredSlice("source", 0, ((0, 1 << 40),), whole), box),))
        for place, (box, whole) in enumerate(boxes)
    ]
    outputs = [OutputTensor(tensor.name, "Float32", tensor.shape, tensor.nbytes) for tensor in tensors]
    layout = lay_out_ckpt(outputs, record) if format == "ckpt" else lay_out_safetensors(outputs)
    return TargetFile(number, f"target{number}", layout, tensors, frozenset(["source"]))


@st.composite
def groups(draw: st.DrawFn) -> list[TargetFile]:
    """Files that hold columns of the same tensors, or one file."""
    members = draw(st.sampled_from([1, 1, 2, 3]), "members")
    shapes = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=6), "shapes")
    format = draw(st.sampled_from(["ckpt", "safetensors"]), "format")
    record = draw(st.sampled_from([64, 1 << 20]), "record")
    boxes = [
        [
            (((0, rows), (member * width, (member + 1) * width)), ((0, rows), (0, members * width)))
            for rows, width in shapes
        ]
        for member in range(members)
    ]
    made = [target(number, of_member, format, record) for number, of_member in enumerate(boxes)]
    if draw(st.booleans(), "one layout"):
        made = [file._replace(layout=made[0].layout) for file in made]
    return made


def bytes_of(segments: Sequence[Segment]) -> Iterator[tuple[int, object]]:
    """Per byte its offset in the file, and the literal byte, or tensor and place in it."""
    for segment in segments:
        if isinstance(segment, Literal):
            yield from enumerate(bytes(segment.data), segment.offset)
        else:
            for place in range(segment.start, segment.stop):
                yield segment.offset + place - segment.start, (segment.tensor, place)


@pytest.mark.deep
@pytest.mark.parametrize("part_bytes", [16, 100, 3000])
def test_every_byte_of_every_file_is_in_one_part(part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MIN_PART_BYTES", part_bytes)
    monkeypatch.setattr(parts, "MAX_PART_BYTES", part_bytes)

    @examples(150)
    @given(groups(), st.integers(1, 8))
    def check(group: list[TargetFile], threads: int) -> None:
        written: list[list[tuple[int, object]]] = [[] for _ in group]
        for part in parts_of(group, threads):
            for share in part:
                of_members, shared = share.cut()
                for of_member, segments in zip(written, of_members):
                    of_member += bytes_of(segments)
                if shared is not None:
                    rows = shared.last - shared.first
                    sizes = [sum(s.stop - s.start for s in segments if isinstance(s, Data)) for segments in of_members]
                    assert sizes == [rows * row for row in shared.row_bytes]
        for file, of_member in zip(group, written):
            assert of_member == list(bytes_of(list(file.layout.segments())))

    check()


def test_columns_of_the_same_rows_are_cut_between_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MIN_PART_BYTES", 1000)
    whole = ((0, 100), (0, 20))
    group = [target(n, [(((0, 100), (n * 10, n * 10 + 10)), whole)], "safetensors", 1 << 20) for n in range(2)]
    shares = [share.cut()[1] for part in parts_of(group, 2) for share in part]
    assert len(shares) > 4
    assert [shared.first for shared in shares if shared is not None] == [
        100 * number // len(shares) for number in range(len(shares))
    ]


class Unplanned(Sequence[TargetTensor]):
    """Tensors that are not looked up."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, place: object) -> NoReturn:
        raise AssertionError("a tensor was planned")


def test_cutting_plans_no_tensor() -> None:
    """Each of many processes cuts all files, and plans only the tensors of its own parts."""
    layout = OutputLayout()
    for tensor in range(50):
        layout.add(b"header", tensor, 0, random.Random(tensor).randrange(1, 400 << 20))
    group = [TargetFile(number, f"{number}", layout, Unplanned(), frozenset()) for number in range(3)]
    cut = list(parts_of(group, 16))
    assert len(cut) > 50
    assert {type(share) for part in cut for share in part} == {TensorShare}


def test_parts_have_about_the_same_size() -> None:
    layout = OutputLayout()
    for tensor in range(30):
        layout.add(b"", tensor, 0, 64 << 20)
    group = [TargetFile(0, "0", layout, Unplanned(), frozenset())]
    sizes = [sum((64 << 20) / share.shares for share in part) for part in parts_of(group, 16)]
    assert max(sizes) <= 1.5 * min(sizes)
    assert len(sizes) >= 3 * 16
