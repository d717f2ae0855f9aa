"""A store is one class and one line: no code outside the room compares stores."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from reshard.storage import Store
from tests.corpus import ROOT
from tests.forms import FORMS, to
from tests.running import Argument, Result, done, fails, reshard
from tests.small import World, tensors
from tests.storage.places import ToyPlace
from tests.storage.toy import ToyStore
from tests.trees import read_tree, same_ranks

FULL = tensors()
ASKS = re.compile(
    r"""in_object_store|scheme_of|reshard\.storage\.(?:s3|local\b(?!\ import\ WrittenFile))|import\ s3\b
    |(?:startswith|partition|split)\(["'](?:s3)?://|["']s3:?/?/?["']
    |isinstance\([^)]*Store\b""",
    re.VERBOSE,
)


def copied(directory: Path, place: ToyPlace) -> str:
    """Copy a local directory into the toy store; returns its path there."""
    for file in directory.rglob("*"):
        if file.is_file():
            place.put(str(file.relative_to(directory)), file.read_bytes())
    return place.path


def fetched(path: str, toy: ToyStore, directory: Path) -> Path:
    """A directory of the toy store as a local one."""
    prefix = path.partition("://")[2] + "/"
    for key in toy.keys(prefix):
        if not key.endswith("/"):
            file = directory / key[len(prefix) :]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(toy.file(key).read_bytes())
    return directory


@pytest.mark.deep
@pytest.mark.parametrize("form", FORMS)
def test_a_registered_store_is_converted_from_and_to(form: str, world: World, toy: ToyStore) -> None:
    world.save(FULL)
    src = copied(world.src, ToyPlace(toy))
    middle, back = "toy://a/middle", world.root / "back"
    done("convert", src, middle, "--src-strategy", world.old, "--verify", *to(form, world))
    source: list[Argument] = ["--src-strategy", world.new] if form == "ranks" else []
    done("convert", middle, back, *source, "--dst-strategy", world.new, "--verify")
    same_ranks(read_tree(back), world.expected(FULL))
    report = done("status", middle, "--json").json
    assert report["complete"]
    done("verify", middle, "--src", src, "--src-strategy", world.old, *to(form, world)[2:])
    assert not toy.keys("a/middle/.reshard/lock") and not list((world.root / "toy/new").glob("*"))


def words_of(world: World, dst: str, *options: Argument) -> list[Argument]:
    return ["convert", world.src, dst, "--src-strategy", world.old, "--dst-strategy", world.new, *options]


def test_an_interrupted_run_in_a_registered_store_resumes(world: World, toy: ToyStore) -> None:
    world.save(FULL)
    named: list[str] = []

    def stop(path: str) -> None:
        if named:
            raise OSError(5, "the store is away")
        named.append(path)

    toy.published = stop
    dst = "toy://out"
    fails(1, *words_of(world, dst, "--jobs", 1), texts=["the store is away"])
    report = done("status", dst, "--json").json
    assert not report["complete"] and len(report["done"]) == 1
    toy.published = named.append
    first = list(named)
    done("resume", dst)
    assert done("status", dst, "--json").json["complete"]
    assert not set(first) & set(named[len(first) :])
    same_ranks(read_tree(fetched(dst, toy, world.root / "out")), world.expected(FULL))


@pytest.mark.parametrize("replaces", [False, True])
def test_of_two_conversions_in_a_registered_store_one_ends_with_an_error(
    replaces: bool, world: World, toy: ToyStore
) -> None:
    world.save(FULL)
    dst = "toy://out"
    others: list[Result] = []
    more = ["--overwrite"] if replaces else []

    def meanwhile(path: str) -> None:
        if not others:
            toy.published = lambda path: None
            others.append(reshard(*words_of(world, dst, "--include", "w", *more)))

    toy.published = meanwhile
    # Without locks, the first one looks at the plan before it names a file.
    first = reshard(*words_of(world, dst, "--jobs", 1))
    assert [first.status, others[0].status] == ([3, 0] if replaces else [0, 3]), (first.err, others[0].err)
    assert "another conversion" in (first if replaces else others[0]).err


def lines_of_other_rooms() -> Sequence[tuple[str, str]]:
    files = [path for path in Path(ROOT, "reshard").rglob("*.py") if "storage" not in path.relative_to(ROOT).parts]
    return [(f"{path}:{number}", line) for path in files for number, line in enumerate(path.read_text().split("\n"), 1)]


def test_no_other_code_compares_stores() -> None:
    for place, line in lines_of_other_rooms():
        assert not ASKS.search(line), f"{place}: ask a method of its store: {line}"


def test_contributing_lists_what_a_store_implements() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    shown = re.search(r"\* \*\*A store\*\*.*?(?=\n\* \*\*)", text, re.DOTALL)
    assert shown is not None
    listing = set(re.findall(r"`(\w+)\(\)`", shown[0]))
    assert listing == set(Store.__abstractmethods__)
