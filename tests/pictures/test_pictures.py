"""Pictures: valid, complete, and with notes on omitted parts."""

from __future__ import annotations

import re
from math import prod
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.pictures.slices import Arrangement, parameter_picture
from reshard.pictures.transfers import transfer_map
from reshard.strategies import Holding, RecordedLayout, Stage
from reshard.text.messages import byte_size, stepped_ranges
from tests.layouts import layouts, shapes
from tests.number_words import numbers_named
from tests.reference import LayoutDict, axes_of, boxes

Parameter = tuple[LayoutDict, list[int], Arrangement]
SVG = "{http://www.w3.org/2000/svg}"


def words(picture: bytes) -> list[str]:
    """All text of a picture that must parse as XML."""
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def paths_of(picture: bytes, class_: str) -> list[str]:
    """What the paths of a class draw."""
    paths = ElementTree.fromstring(picture).iter(f"{SVG}path")
    return [path.attrib["d"] for path in paths if path.attrib["class"] == class_]


def painted_cells(picture: bytes, class_: str = "heat") -> int:
    return sum(d.count("M") for d in paths_of(picture, class_))


def line_places(picture: bytes, class_: str) -> tuple[list[float], list[float]]:
    """Where the horizontal and the vertical lines of a class are, from the map's corner."""
    (d,) = paths_of(picture, class_)
    rows = [float(at) for at in re.findall(r"M0 ([\d.]+)h", d)]
    return rows, [float(at) for at in re.findall(r"M([\d.]+) 0v", d)]


def test_a_transfer_map_draws_a_cell_per_pair_that_exchanges_data() -> None:
    moved = {(0, 0): 3 << 30, (1, 0): 1 << 20, (2, 1): 5, (3, 1): 0}
    picture = transfer_map(moved, 4, 2, "four to two")
    assert painted_cells(picture) == 3
    text = words(picture)
    assert {"3.0 GiB", "1.0 MiB", "5 B", "four to two", "source rank", "target rank"} <= set(text)
    assert f"{byte_size(sum(moved.values()))} from 4 source ranks to 2 target ranks; 3 of 8 pairs" in " ".join(text)
    assert "source rank 0 to target rank 0" in " ".join(text)


def test_a_transfer_map_of_many_ranks_sums_neighbours_and_notes_it() -> None:
    moved = {(rank, rank): 1024 for rank in range(600)}
    picture = transfer_map(moved, 600, 600, "many")
    assert painted_cells(picture) == 120
    text = " ".join(words(picture))
    assert "a cell is 5 source ranks by 5 target ranks" in text
    assert "is 5.0 KiB, as from source ranks 0-4 to target ranks 0-4" in text
    assert len(picture) < 50_000


def test_a_transfer_map_separates_and_names_pipeline_stages() -> None:
    picture = transfer_map({(0, 0): 1}, 16, 24, "x", source_stages=[0, 8], target_stages=[0, 12, 18])
    down, across = 640 // 16, 640 // 24
    assert line_places(picture, "stage") == ([8 * down + 0.5], [12 * across + 0.5, 18 * across + 0.5])
    assert [word for word in words(picture) if word.startswith("stage")] == [
        *("stage 0", "stage 1", "stage 2"),
        *("stage 0", "stage 1"),
    ]
    alone = transfer_map({(0, 0): 1}, 16, 24, "x", source_stages=[0], target_stages=[0])
    assert not paths_of(alone, "stage") and not any(word.startswith("stage") for word in words(alone))


def test_narrow_stages_have_no_captions() -> None:
    picture = transfer_map({(0, 0): 1}, 1024, 1, "x", source_stages=range(0, 1024, 16))
    assert len(line_places(picture, "stage")[0]) == 63 and not any(word.startswith("stage") for word in words(picture))


def test_a_transfer_map_without_transfers_notes_it() -> None:
    assert "0 B from 3 source ranks to 1 target rank; 0 of 3 pairs" in " ".join(words(transfer_map({}, 3, 1, "x")))


def test_a_picture_with_any_title_is_valid_xml() -> None:
    picture = transfer_map({(0, 0): 1}, 1, 1, 'a<b>&"c"\x00\x1b[31m\ud800 块')
    assert words(picture)[0] == 'a<b>&"c"\\x00\\x1b[31m\\ud800 块'


def test_a_picture_has_colours_for_light_and_dark_pages() -> None:
    picture = transfer_map({(0, 0): 1}, 1, 1, "x").decode()
    light, dark = picture.split("@media (prefers-color-scheme:dark)")
    assert ".page{fill:#ffffff}" in light and ".page{fill:#0d1117}" in dark


# One parameter.


def arranged(
    layout_record: LayoutDict, shape: list[int], first_rank: int = 0, whole_shape: bool = False
) -> Arrangement:
    recorded = RecordedLayout(
        tuple(layout_record["dev_matrix"]),
        tuple(tuple(axes) or (-1,) for axes in axes_of(layout_record["tensor_map"], len(shape))),
        nested=True,
        tensor_shape=tuple(shape) if whole_shape else None,
        shard_step=layout_record["shard_step"],
        shard_size=layout_record["shard_size"],
        split_sizes=tuple(layout_record["uneven"] or ()),
        split_offsets=tuple(sum(layout_record["uneven"][:at]) for at in range(len(layout_record["uneven"])))
        if layout_record["uneven"]
        else (),
    )
    layout = recorded.layout()
    return Arrangement(Holding(Stage(1, first_rank, layout.device_count, {"w": layout}), layout))


@st.composite
def parameters(draw: st.DrawFn) -> Parameter:
    shape = draw(shapes(1))
    devices = draw(st.sampled_from([1, 4, 6, 8, 12, 24, 48]))
    layout_record = draw(layouts(devices, shape))
    return layout_record, shape, arranged(layout_record, shape, draw(st.sampled_from([0, 16])), draw(st.booleans()))


@given(parameters())
def test_the_slices_of_a_picture_equal_those_of_the_ranks(
    parameter: Parameter,
) -> None:
    layout_record, shape, arrangement = parameter
    contents: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for local, box in enumerate(boxes(layout_record, shape)):
        contents.setdefault(box, []).append(arrangement.holding.stage.first_rank + local)
    actual = {}
    for drawn in arrangement.slices():
        units = [
            1 if reference else size // extent
            for reference, size, extent in zip(arrangement.in_elements, shape, arrangement.extents)
        ]
        actual[tuple((start * unit, stop * unit) for (start, stop), unit in zip(drawn.box, units))] = list(drawn.ranks)
    # Equal to the oracle: the tensor is covered once, and every rank is in one slice.
    assert actual == contents
    assert sum(prod(stop - start for start, stop in box) for box in actual) == prod(shape)


@given(parameters())
def test_a_parameters_picture_is_valid_xml_with_a_tooltip_per_rank(
    parameter: Parameter,
) -> None:
    arrangement = parameter[2]
    picture = parameter_picture("a<w>&", [arrangement, arrangement])
    assert words(picture)[0] == "a<w>&"
    rested = [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}title")][1:]
    named = [rank for text in rested for rank in numbers_named(re.split("ranks? ", re.sub(", shard .*", "", text))[-1])]
    first = arrangement.holding.stage.first_rank
    everyone = range(first, first + arrangement.layout.device_count)
    if "left out" not in " ".join(words(picture)):
        assert sorted(named) == sorted([*everyone, *everyone])
    for element in ElementTree.fromstring(picture).iter(f"{SVG}rect"):
        assert float(element.attrib["width"]) > 0 and float(element.attrib["height"]) > 0


@given(parameters())
def test_equal_colours_are_equal_slices(parameter: Parameter) -> None:
    arrangement = parameter[2]
    root = ElementTree.fromstring(parameter_picture("w", [arrangement]))
    style = next(root.iter(f"{SVG}style")).text or ""
    light = dict(re.findall(r"\.(slice\d+)\{fill:(#\w+)\}", style.split("@media")[0]))
    dark = dict(re.findall(r"\.(slice\d+)\{fill:(#\w+)\}", style.split("@media")[1]))
    assert len(set(light.values())) == len(light) == len(dark) == len(set(dark.values()))
    boxes_of: dict[str, set[str]] = {}
    for rectangle in root.iter(f"{SVG}rect"):
        title = rectangle.find(f"{SVG}title")
        if title is not None and title.text is not None:
            boxes_of.setdefault(rectangle.attrib["class"], set()).add(title.text.rpartition(": ")[0])
    assert all(len(boxes) == 1 for boxes in boxes_of.values())


def test_uneven_slices_are_drawn_in_proportion() -> None:
    layout_record = {
        "dev_matrix": [4],
        "tensor_map": [0, -1],
        "shard_step": 0,
        "shard_size": 0,
        "uneven": [10, 20, 30, 4],
    }
    picture = parameter_picture("w", [arranged(layout_record, [64, 3])])
    heights = [
        float(element.attrib["height"]) + 1
        for element in ElementTree.fromstring(picture).iter(f"{SVG}rect")
        if list(element)
    ]
    assert heights == pytest.approx([sum(heights) / 64 * rows for rows in (10, 20, 30, 4)], abs=0.1)


def test_a_picture_of_many_slices_prints_the_number_of_omitted_ones() -> None:
    layout_record = {"dev_matrix": [4096], "tensor_map": [0], "shard_step": 0, "shard_size": 0, "uneven": None}
    arrangement = arranged(layout_record, [8192])
    picture = parameter_picture("w", [arrangement])
    assert len(picture) < 50_000 and "4065 of 4096 slices of dimension 0 are left out" in words(picture)


@given(st.sets(st.integers(0, 200)), st.integers(1, 9), st.integers(1, 60), st.integers(1, 6))
def test_stepped_ranges_expand_to_the_same_numbers(odd: set[int], run: int, step: int, times: int) -> None:
    regular = {start + at for start in range(300, 300 + step * times, step) for at in range(run)}
    numbers = odd | regular
    assert numbers_named(stepped_ranges(numbers, most=10**6)) == numbers


def test_stepped_ranges_are_short() -> None:
    assert stepped_ranges(range(0, 512, 8)) == "0-504 step 8"
    assert stepped_ranges(rank for rank in range(512) if rank % 8 < 4) == "0-3..504-507 step 8"
    assert stepped_ranges([0, 4]) == "0,4"
    assert stepped_ranges([1, 2, 3, 7]) == "1-3,7"
    assert stepped_ranges([n * n for n in range(4, 24)], most=3) == "16,25,36 and 17 more"
