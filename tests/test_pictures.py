"""The pictures: well-formed, whole, and saying what they leave out."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from reshard.pictures import transfer_map
from reshard.wording import byte_size

SVG = "{http://www.w3.org/2000/svg}"


def words(picture: bytes) -> list[str]:
    """All text of a picture that must parse as XML."""
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def painted_cells(picture: bytes) -> int:
    paths = ElementTree.fromstring(picture).iter(f"{SVG}path")
    return sum(path.attrib["d"].count("M") for path in paths)


def test_a_transfer_map_paints_a_cell_per_pair_that_moves_something() -> None:
    moved = {(0, 0): 3 << 30, (1, 0): 1 << 20, (2, 1): 5, (3, 1): 0}
    picture = transfer_map(moved, 4, 2, "four to two")
    assert painted_cells(picture) == 3
    said = words(picture)
    assert {"3.0 GiB", "1.0 MiB", "5 B", "four to two", "source rank", "target rank"} <= set(said)
    assert f"{byte_size(sum(moved.values()))} from 4 source ranks to 2 target ranks; 3 of 8 pairs" in " ".join(said)
    assert "source rank 0 to target rank 0" in " ".join(said)


def test_a_transfer_map_adds_up_neighbours_of_many_ranks_and_says_so() -> None:
    moved = {(rank, rank): 1024 for rank in range(600)}
    picture = transfer_map(moved, 600, 600, "many")
    assert painted_cells(picture) == 120
    said = " ".join(words(picture))
    assert "a cell is 5 source ranks by 5 target ranks" in said
    assert "stands for 5.0 KiB, as from source ranks 0-4 to target ranks 0-4" in said
    assert len(picture) < 50_000


def test_a_transfer_map_of_nothing_says_so() -> None:
    assert "0 B from 3 source ranks to 1 target rank; 0 of 3 pairs" in " ".join(words(transfer_map({}, 3, 1, "x")))


def test_a_transfer_map_refuses_ranks_beyond_the_counts() -> None:
    with pytest.raises(ValueError, match="beyond 2 source"):
        transfer_map({(2, 0): 1}, 2, 1, "x")


def test_a_picture_is_xml_whatever_its_title_holds() -> None:
    picture = transfer_map({(0, 0): 1}, 1, 1, 'a<b>&"c"\x00\x1b[31m\ud800 块')
    assert words(picture)[0] == 'a<b>&"c"\\x00\\x1b[31m\\ud800 块'


def test_a_picture_has_colours_for_light_and_for_dark_pages() -> None:
    picture = transfer_map({(0, 0): 1}, 1, 1, "x").decode()
    light, dark = picture.split("@media (prefers-color-scheme:dark)")
    assert ".page{fill:#ffffff}" in light and ".page{fill:#0d1117}" in dark
