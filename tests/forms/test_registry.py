"""A form of checkpoint is one folder and one line: nothing else knows which forms there are."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.forms import FORM_CLASSES
from reshard.forms.form import Form
from reshard.forms.registry import all_forms, form_named
from reshard.storage import names_in
from tests.corpus import ROOT
from tests.forms import FORMS, in_safetensors, to
from tests.forms import toy as toy_form
from tests.forms.toy import LIST, ToyForm
from tests.running import Argument, done, fails
from tests.small import World, tensors
from tests.trees import read_tree, same_ranks

FULL = tensors()

ASKS = re.compile(
    r"""[!=]=\s?["'](?:ranks|checkpoint2|unified|huggingface)["']
    |["'](?:ranks|checkpoint2|unified|huggingface)["']\s?[!=]=
    |(?:[!=]=|\bin)\ \(?(?:RANKS|CHECKPOINT2|UNIFIED|HUGGINGFACE)\b
    |isinstance\([^)]*\b(?:Checkpoint2|FullWeights|RankCheckpoint)\b""",
    re.VERBOSE,
)


@pytest.fixture
def toy() -> Iterator[Form]:
    """The toy form, registered."""
    others = dict(FORM_CLASSES)
    FORM_CLASSES.clear()
    # The toy comes before forms that recognise its files, too.
    FORM_CLASSES.update({"ranks": others["ranks"], "toy": f"{ToyForm.__module__}:{ToyForm.__name__}", **others})
    try:
        yield form_named("toy")
    finally:
        FORM_CLASSES.clear()
        FORM_CLASSES.update(others)


@pytest.mark.deep
@pytest.mark.parametrize("form", [*FORMS, "toy"])
def test_a_registered_form_converts_both_ways(form: str, world: World, toy: Form) -> None:
    world.save(FULL)
    one, two, other, ranks = (world.root / name for name in ("one", "two", "other", "ranks"))
    done("convert", world.src, one, "--src-strategy", world.old, "--to", "toy", "--format", "safetensors")
    done("convert", one, other, *in_safetensors(form), *to(form, world))
    source: list[Argument] = ["--src-strategy", world.new] if form == "ranks" else []
    done("convert", other, two, *source, "--to", "toy")
    done("convert", two, ranks, "--dst-strategy", world.new, "--format", "ckpt")
    same_ranks(read_tree(ranks), world.expected(FULL))
    assert (one / LIST).is_file() and len([*one.glob("*.safetensors")]) == 4


def test_commands_accept_a_registered_form(world: World, toy: Form) -> None:
    world.save(FULL)
    out = world.root / "out"
    words: list[Argument] = ["--src-strategy", world.old, "--to", "toy", "--format", "safetensors"]
    for number in reversed(range(4)):
        assert not (out / LIST).exists()
        done("by-rank", number, world.src, out, *words)
    assert "4 files" in done("status", out).out
    report = done("inspect", out, "--json").json
    assert report["form"] == "toy" and {tensor["name"] for tensor in report["tensors"]} == set(FULL)
    assert "[8,6]" in done("get", out, "w").out
    one, other = (done("fingerprint", *source).out for source in ([out], [world.src, "--strategy", world.old]))
    assert one == other
    done("diff", out, world.src, "--b-strategy", world.old)
    fails(2, "convert", out, world.root / "no", "--src-strategy", world.old, "--to", "toy", texts=["needs no strategy"])
    fails(2, "convert", out, world.root / "no", "--to", "toy", "--max-shard-size", "5G", texts=["--max-shard-size"])
    fails(2, "convert", out, world.root / "no", texts=["is of the form toy", "--to toy, "])


FILES = [".metadata", "0.metadata", "model.safetensors", "x.safetensors.index.json", "__0_0.distcp", "common.pt"]
DIRECTORIES = st.tuples(st.sampled_from(["rank_", "rank", ""]), st.sets(st.sampled_from(FILES)))


@given(st.lists(DIRECTORIES, min_size=1, max_size=8))
def test_no_other_form_recognises_rank_directories(directories: list[tuple[str, set[str]]]) -> None:
    """`RanksForm` recognises them before other forms are loaded."""
    with TemporaryDirectory() as place:
        for number, (prefix, files) in enumerate(directories):
            Path(place, f"{prefix}{number}").mkdir()
            for file in files:
                Path(place, f"{prefix}{number}", file).touch()
        names = names_in(place)
        assert [form.name for form in all_forms() if form.recognise(place, names)] == ["ranks"]


def test_no_other_code_compares_forms() -> None:
    for path in Path(ROOT, "reshard").rglob("*.py"):
        if path.relative_to(ROOT / "reshard").parts[0] != "forms":
            for number, line in enumerate(path.read_text().splitlines(), 1):
                assert not ASKS.search(line), f"{path}:{number}: ask the options or a method of the form: {line}"


def test_contributing_contains_the_toy_form() -> None:
    shown = re.search(r"  ```python\n(  class ToyForm.*?)  ```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert shown is not None
    [page] = ast.parse(textwrap.dedent(shown[1])).body
    form = next(
        node
        for node in ast.parse(Path(toy_form.__file__).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "ToyForm"
    )
    for node in ast.walk(form):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    assert ast.dump(page) == ast.dump(form)
