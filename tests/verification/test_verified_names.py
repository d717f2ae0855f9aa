"""verify and fingerprint with other names, packing and types."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reshard.checkpoints.formats.elements import Words
from reshard.execute import casts
from reshard.layout.views import ZEROS, View
from reshard.names import results
from reshard.verification import operations, reading
from tests.convert.test_edits import values
from tests.execute.test_memory import peaks
from tests.layouts import examples, strategies
from tests.names.test_properties import RandomRule, random_rules
from tests.packed_model import CONFIG, RULES, SHAPES
from tests.running import Argument, Result, done, fails, reshard
from tests.small import COPIED
from tests.trees import Value, cut_ranks, layout, read_checkpoint, single, write_checkpoint, write_strategy, write_tree
from tests.verification.test_verification import flipped

SOURCE = single(
    {
        name: layout([2, 2], {"model.down": [-1, 0], "model.norm": [-1], "model.embedding": [-1, 0]}.get(name, [0, -1]))
        for name in SHAPES
    }
)
TARGET = single(
    {
        "net.qkv": layout([2, 2], [0, -1]),
        "net.gate_up": layout([2, 2], [-1, 1]),
        "net.down": layout([2, 2], [1, 0]),
        "net.embedding": layout([2, 2], [0, -1]),
        "net.experts": layout([2, 2], [1, 0]),
        "net.norm": layout([2, 2], [-1]),
    }
)


def full() -> dict[str, Value]:
    """Tensors of numbers of every size, positive and negative, none of them twice."""
    random = np.random.default_rng(11)
    return {
        name: Value("Float32", random.standard_normal(shape).astype("<f4").view("<u4"))
        for name, shape in SHAPES.items()
    }


class Models:
    """A source, and the words that convert and verify it."""

    def __init__(self, root: Path, rules: str = RULES) -> None:
        self.root = root
        self.src, self.dst = root / "src", root / "dst"
        self.old = write_strategy(root / "strategies" / "old", SOURCE)
        self.new = write_strategy(root / "strategies" / "new", TARGET)
        self.config = root / "config.json"
        self.config.write_text(json.dumps(CONFIG))
        self.rules = self.file("rules", rules)
        write_tree(self.src, cut_ranks(SOURCE, full(), COPIED))

    def file(self, name: str, rules: str) -> Path:
        path = self.root / f"{name}.toml"
        path.write_text(rules)
        return path

    @property
    def strategies(self) -> list[Argument]:
        return ["--src-strategy", self.old, "--dst-strategy", self.new]

    @property
    def names(self) -> list[Argument]:
        return ["--names", self.rules, "--config", self.config]

    def convert(self, *options: Argument) -> Result:
        return done("convert", self.src, self.dst, *self.strategies, *options)

    def verify(self, *options: Argument) -> list[Argument]:
        return ["verify", self.dst, "--src", self.src, *self.strategies, *options]


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


def found(result: Result) -> set[tuple[str, str]]:
    """Kind and parameter of every difference."""
    return {(one["kind"], one["parameter"]) for one in result.json["differences"]}


def test_correct_renamed_targets_verify(models: Models) -> None:
    models.convert(*models.names, "--cast", "bfloat16", "--cast", "*norm=Float32", "--verify")
    done(*models.verify(*models.names, "--cast", "bfloat16", "--cast", "*norm=Float32"))
    # As recorded.
    result = done(*models.verify())
    assert "recorded options: --names" in result.err
    assert "no differences" in result.err


def test_renamed_targets_with_the_source_layout_verify(models: Models) -> None:
    as_source: list[Argument] = ["--src-strategy", models.old, "--dst-strategy", "same"]
    # Two names change places, and these two are cut differently.
    swapped: list[Argument] = ["--rename", "model.q=model.down", "--rename", "model.down=model.q"]
    swapped += ["--rename", "model.norm=net.norm", "--cast", "*.norm=Float16"]
    ranks, iterations, back = models.dst, models.root / "iterations", models.root / "back"
    done("convert", models.src, ranks, *as_source, *swapped, "--verify")
    done("convert", models.src, iterations, "--to", "checkpoint2", *as_source, *swapped, "--verify")
    for converted in (ranks, iterations):
        verify: list[Argument] = ["verify", converted, "--src", models.src, *as_source]
        assert "recorded options: --rename" in done(*verify).err
        one_less = found(fails(4, *verify, *swapped[:4], "--cast", "*.norm=Float16", "--json"))
        assert {name for _, name in one_less} == {"model.norm", "net.norm"}
    # Checkpoint 2.0 records its own layouts.
    renamed: list[Argument] = ["--dst-strategy", "same", "--rename", "net.*=model.*"]
    done("convert", iterations, back, *renamed, "--verify")
    done("verify", back, "--src", iterations, "--dst-strategy", "same")
    path = next((back / "rank_1").iterdir())
    write_checkpoint(path, {**read_checkpoint(path), "model.k": flipped(read_checkpoint(path)["model.k"])})
    result = fails(4, "verify", back, "--src", iterations, *renamed, "--json")
    assert ("content", "model.k") in found(result)


# Mistakes of tables: the output of a wrong table, verified with the right one, is found.

WRONG_TABLES = {
    "gate and up are swapped": ('["model.gate", "model.up"]', '["model.up", "model.gate"]', "net.gate_up"),
    "k and v are swapped": ('["model.q", "model.k", "model.v"]', '["model.q", "model.v", "model.k"]', "net.qkv"),
    "heads lie one after the other": ('"group_qkv"', "{ concat = 0, parts = %s }", "net.qkv"),
    "a transposition is left out": ('do = "transpose"', "", "net.down"),
    "rows alternate": ("{ concat = 0 }", "{ interleave = 0, block = 1 }", "net.gate_up"),
}


@pytest.mark.deep
@pytest.mark.parametrize("mistake", WRONG_TABLES)
def test_wrong_tables_are_found(models: Models, mistake: str) -> None:
    right, wrong, name = WRONG_TABLES[mistake]
    wrong = wrong.replace("%s", '["heads*head_dim", "groups*head_dim", "groups*head_dim"]')
    assert right in RULES
    models.convert("--names", models.file("wrong", RULES.replace(right, wrong)), "--config", models.config)
    assert found(fails(4, *models.verify(*models.names, "--json"))) == {("content", name)}


# Mistakes of views, which plans use and verification does not.


def one_row_off(view: View) -> View:
    """For the last of some rows the last but one is taken again."""
    first = view.regions[0]
    if first.source == ZEROS or len(view.shape) < 2:
        return view
    loop = first.loops[0]
    shorter = first._replace(loops=(loop._replace(length=loop.length - 1), *first.loops[1:]))
    origin = list(first.origin)
    origin[loop.dimension] += (loop.length - 1) * loop.step
    before = list(first.source_origin)
    before[loop.source_dimension] += (loop.length - 2) * loop.source_step
    last = first._replace(origin=tuple(origin), source_origin=tuple(before), loops=first.loops[1:])
    return View(view.shape, (shorter, last, *view.regions[1:]))


def other_source(view: View) -> View:
    """The second and the third source are swapped."""
    turned = {1: 2, 2: 1}
    regions = tuple(region._replace(source=turned.get(region.source, region.source)) for region in view.regions)
    return View(view.shape, regions) if len({region.source for region in view.regions}) > 2 else view


def not_turned(view: View) -> View:
    """Squares are not transposed."""
    loops = view.regions[0].loops
    if len(view.regions) > 1 or [loop.source_dimension for loop in loops] != [1, 0]:
        return view
    turned = tuple(loop._replace(source_dimension=loop.dimension) for loop in loops)
    return View(view.shape, (view.regions[0]._replace(loops=turned),))


@pytest.mark.parametrize(
    ("mistake", "names"),
    [
        (one_row_off, {"net.qkv", "net.gate_up", "net.down", "net.embedding", "net.experts"}),
        (other_source, {"net.qkv"}),
        (not_turned, {"net.down"}),
    ],
)
def test_wrong_views_are_found(
    models: Models, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[View], View], names: set[str]
) -> None:
    def wrong(*arguments: Any) -> Any:
        return [(needed, mistake(view)) for needed, view in results(*arguments)]

    monkeypatch.setattr("reshard.names.results", wrong)
    result = fails(4, "convert", models.src, models.dst, *models.strategies, *models.names, "--verify", "--json")
    assert found(result) == {("content", name) for name in names}


def truncated(source: Words, stored: str, out: Words, dtype: str) -> None:
    """Float32 as BFloat16 without rounding."""
    out[...] = source >> 16


def test_a_cast_that_truncates_is_found(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "put_words", truncated)
    options: list[Argument] = [*models.strategies, *models.names, "--cast", "BFloat16"]
    result = fails(4, "convert", models.src, models.dst, *options, "--verify", "--json")
    assert found(result) == {("content", name) for name in TARGET[0]["layouts"]}


def test_padding_that_is_not_zero_is_found(models: Models) -> None:
    models.convert(*models.names)
    # Rows 5 to 7 of 8 are padding: the last three of ranks 2 and 3.
    path = next((models.dst / "rank_3").iterdir())
    tensors = read_checkpoint(path)
    assert not tensors["net.embedding"].array[1:].any() and tensors["net.embedding"].array[0].any()
    tensors["net.embedding"] = flipped(tensors["net.embedding"], at=-1)
    write_checkpoint(path, tensors)
    result = fails(4, *models.verify(*models.names, "--json"))
    assert {("content", "net.embedding")} <= found(result)
    assert {tuple(one["ranks"]) for one in result.json["differences"] if one["kind"] == "content"} == {(3,)}


def test_missing_and_surplus_names_are_listed(models: Models) -> None:
    models.convert(*models.names)
    shutil.rmtree(models.dst / ".reshard")
    (models.dst / "reshard-manifest.json").unlink()
    path = next((models.dst / "rank_1").iterdir())
    tensors = read_checkpoint(path)
    tensors["model.q"] = tensors.pop("net.norm")
    write_checkpoint(path, tensors)
    result = fails(4, *models.verify(*models.names, "--json"))
    assert found(result) == {("missing", "net.norm"), ("extra", "model.q")}


def test_values_beside_renamed_tensors_are_compared(models: Models) -> None:
    models.new = models.old
    models.convert("--cast", "BFloat16", "--verify")
    path = next((models.dst / "rank_2").iterdir())
    tensors = read_checkpoint(path)
    tensors["global_step"] = flipped(tensors["global_step"])
    write_checkpoint(path, tensors)
    assert ("content", "global_step") in found(fails(4, *models.verify("--json")))


def test_any_nan_of_a_cast_element_equals_any_other_and_nothing_else(models: Models) -> None:
    models.new = models.old
    tensors = full()
    tensors["model.norm"].array[:4] = [0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0x7F800000]
    write_tree(models.src, cut_ranks(SOURCE, tensors, COPIED))
    models.convert("--cast", "BFloat16", "--verify")
    stored = {path: read_checkpoint(path) for path in models.dst.glob("rank_*/*.ckpt")}
    for place, word, status in ((0, 0xFFAB, 0), (0, 0x7F80, 4), (3, 0x7F81, 4), (4, 0x7FC0, 4)):
        for path, written in stored.items():
            norm = written["model.norm"].array.copy()
            norm[place] = word
            write_checkpoint(path, {**written, "model.norm": Value("BFloat16", norm)})
        result = reshard(*models.verify("--json"))
        assert result.status == status and (not status or found(result) == {("content", "model.norm")})


def test_filters_match_written_names(models: Models) -> None:
    models.convert(*models.names, "--exclude", "net.down", "--verify")
    done(*models.verify(*models.names, "--exclude", "net.down"))
    done(*models.verify(*models.names))
    (models.dst / "reshard-manifest.json").unlink()
    shutil.rmtree(models.dst / ".reshard")
    assert found(fails(4, *models.verify(*models.names, "--json"))) == {("missing", "net.down")}


def test_ranks_selects_the_compared_renamed_targets(models: Models) -> None:
    models.convert(*models.names, "--ranks", "1,2", "--verify")
    done(*models.verify(*models.names, "--ranks", "1"))
    fails(4, *models.verify(*models.names))


# The recorded names and types of a directory.


def test_without_records_rules_must_be_typed(models: Models) -> None:
    models.convert(*models.names, "--cast", "BFloat16")
    shutil.rmtree(models.dst / ".reshard")
    (models.dst / "reshard-manifest.json").unlink()
    done(*models.verify(*models.names, "--cast", "BFloat16"))
    fails(4, *models.verify(*models.names))
    fails(2, *models.verify(), texts=["--names"])


def test_without_records_casts_must_be_typed(models: Models) -> None:
    models.new = models.old
    models.convert("--cast", "BFloat16")
    shutil.rmtree(models.dst / ".reshard")
    (models.dst / "reshard-manifest.json").unlink()
    fails(2, *models.verify(), texts=["--cast"])
    done(*models.verify("--cast", "BFloat16"))


def test_a_changed_table_is_not_the_recorded_one(models: Models) -> None:
    models.convert(*models.names)
    done(*models.verify())
    models.rules.write_text(RULES.replace('["model.gate", "model.up"]', '["model.up", "model.gate"]'))
    fails(2, *models.verify(), texts=["have changed since"])
    models.rules.unlink()
    fails(3, *models.verify(), texts=["rules.toml"])


def test_names_without_a_source_are_wrong_usage(models: Models) -> None:
    models.convert(*models.names)
    fails(2, "verify", models.dst, *models.names, texts=["--src"])


def test_tensors_that_are_only_renamed_are_compared(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    target = single({name.replace("model.", "net."): made_ for name, made_ in SOURCE[0]["layouts"].items()})
    models.new = write_strategy(models.root / "strategies" / "renamed", target)
    monkeypatch.setattr(operations.DerivedTensor, "read", None)
    models.convert("--rename", "model.*=net.*", "--verify")
    done(*models.verify("--rename", "model.*=net.*"))
    fails(4, *models.verify("--rename", "model.*=nut.*"))


def test_swapped_names_are_found(models: Models) -> None:
    """q under o's name and o under q's, both of one shape."""
    swapped = {"model.gate": "model.up", "model.up": "model.gate"}
    models.new = models.old
    models.convert("--rename", "model.gate=model.up", "--rename", "model.up=model.gate", "--verify")
    tensors = read_checkpoint(next((models.dst / "rank_0").iterdir()))
    contents = read_checkpoint(next((models.src / "rank_0").iterdir()))
    for name, tensor in contents.items():
        assert tensors[swapped.get(name, name)].array.tobytes() == tensor.array.tobytes()
    shutil.rmtree(models.dst / ".reshard")
    (models.dst / "reshard-manifest.json").unlink()
    assert found(fails(4, *models.verify("--json"))) == {("content", "model.gate"), ("content", "model.up")}


def test_tied_tensors_that_differ_are_found(tmp_path: Path) -> None:
    shape = (64, 40 << 10)
    array = np.arange(shape[0] * shape[1], dtype="<u4").reshape(shape)
    other = array.copy()
    other[0, -1] += 1
    rules = '[[rule]]\nfrom = "net.weight"\nto = ["a.weight", "b.weight"]\ndo = "copy"\n'
    (tmp_path / "rules.toml").write_text(rules)
    tied = Value("Float32", array)
    write_checkpoint(tmp_path / "src.ckpt", {"a.weight": tied, "b.weight": tied})
    words: list[Argument] = ["--src-strategy", "none", "--dst-strategy", "none", "--names", tmp_path / "rules.toml"]
    done("convert", tmp_path / "src.ckpt", tmp_path / "dst", *words, "--verify")
    write_checkpoint(tmp_path / "src.ckpt", {"a.weight": tied, "b.weight": Value("Float32", other)})
    result = fails(4, "verify", tmp_path / "dst", "--src", tmp_path / "src.ckpt", *words, "--json")
    assert found(result) == {("content", "b.weight")}


def test_differing_copies_of_shared_parameters_are_found(tmp_path: Path) -> None:
    two = [*single({"w.weight": layout([1], [-1, -1])}), *single({"w.weight": layout([1], [-1, -1])})]
    array = np.arange(0x3F800000, 0x3F800000 + 24, dtype="<u4").reshape(4, 6)
    ranks = cut_ranks(two, {"w.weight": Value("Float32", array)})
    old = write_strategy(tmp_path / "old", two, None, "merged")
    write_tree(tmp_path / "src", ranks)
    words: list[Argument] = ["--src-strategy", old, "--dst-strategy", "none", "--cast", "BFloat16", "--json"]
    done("convert", tmp_path / "src", tmp_path / "one", *words, "--verify")
    write_tree(tmp_path / "src", {1: {"w.weight": flipped(ranks[1]["w.weight"])}})
    result = fails(4, "verify", tmp_path / "one", "--src", tmp_path / "src", *words)
    assert ("stages", "w.weight") in found(result)


# Fingerprints.


def whole(result: Result) -> str:
    return str(result.json["fingerprint"])


def test_a_model_has_one_fingerprint_in_both_namings(models: Models) -> None:
    models.convert(*models.names)
    source: list[Argument] = ["fingerprint", models.src, "--strategy", models.old, "--json"]
    converted: list[Argument] = ["fingerprint", models.dst, "--strategy", models.new, "--json"]
    target = whole(done(*source, *models.names))
    assert target == whole(done(*converted))
    plain = whole(done(*source))
    assert target != plain
    assert whole(done(*converted, *models.names)) == plain
    assert whole(done(*converted, *models.names, "--reverse")) == plain


def test_a_cast_has_the_fingerprint_of_its_result(models: Models) -> None:
    cast: list[Argument] = [*models.names, "--cast", "Float16"]
    models.convert(*cast)
    source = done("fingerprint", models.src, "--strategy", models.old, "--json", *cast)
    assert whole(source) == whole(done("fingerprint", models.dst, "--strategy", models.new, "--json"))


def test_a_fingerprint_in_another_naming_requires_the_whole_source(models: Models) -> None:
    words: list[Argument] = ["fingerprint", models.src, "--strategy", models.old, *models.names]
    fails(2, *words, "--ranks", "0", texts=["--ranks"])
    for rank in (1, 3):
        shutil.rmtree(models.src / f"rank_{rank}")
    fails(3, *words, texts=["model.gate"])


# Memory.

LARGE = """
[[rule]]
from = "model.turned"
to = "net.turned"
do = "transpose"

[[rule]]
from = ["model.gate", "model.up"]
to = "net.gate_up"
do = { interleave = 1, block = 1 }

[[rule]]
from = "model.mixed"
to = "net.mixed"
do = ["transpose", { reshape = ["rows", "columns"], to = ["rows*columns"] }]
"""


@pytest.mark.long
def test_memory_of_verify_with_names_stays_under_the_limit(tmp_path: Path) -> None:
    rows, columns = 3072, 4096
    array = np.arange(rows * columns, dtype="<u4").reshape(rows, columns)
    array += np.uint32(0x30000000)
    names = ("model.turned", "model.gate", "model.up", "model.mixed")
    write_checkpoint(tmp_path / "model.safetensors", {name: Value("Float32", array) for name in names})
    (tmp_path / "rules.toml").write_text(LARGE)
    target = {"net.turned": layout([2], [0, -1]), "net.gate_up": layout([2], [-1, 0]), "net.mixed": layout([2], [0])}
    strategy = write_strategy(tmp_path / "dst", single(target))
    words: list[Argument] = [
        tmp_path / "dst_tree", "--src", tmp_path / "model.safetensors", "--src-strategy", "none",
        "--dst-strategy", strategy, "--names", tmp_path / "rules.toml", "--cast", "*=BFloat16",
    ]  # fmt: skip
    done("convert", words[2], words[0], *words[3:])
    for jobs in (1, 4):
        peak = peaks(["verify", *words, "--max-memory", "16M", "--jobs", jobs]).anonymous
        assert peak < (16 + 100) << 20


# Any rules.


@examples(60)
@given(random_rules(), st.data())
def test_numpys_results_verify_and_a_changed_element_is_found(rule: RandomRule, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["Float32", "BFloat16", "Int8", "Int64"]))
    left, right = values(dict(rule.arrays), dtype), values(dict(rule.made), dtype)
    # An element of a tensor of one element is a value, which nothing lays out.
    assume(all(tensor.array.size > 1 for tensor in {**left, **right}.values()))
    before, after = (left, right) if data.draw(st.booleans(), label="forth") else (right, left)
    old, new = data.draw(strategies(before)), data.draw(strategies(after))
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "rules.toml").write_text(rule.text)
        (root / "sizes.json").write_text(json.dumps(rule.config))
        write_tree(root / "src", cut_ranks(old, before), "rank_{rank}/net.ckpt")
        written = cut_ranks(new, after)
        write_tree(root / "dst", written, "rank_{rank}/checkpoint_{rank}.ckpt")
        words: list[Argument] = [
            "verify", root / "dst", "--src", root / "src",
            "--src-strategy", write_strategy(root / "old", old, shapes(before), "merged"),
            "--dst-strategy", write_strategy(root / "new", new, shapes(after), "merged"),
            "--names", root / "rules.toml", "--config", root / "sizes.json",
        ]  # fmt: skip
        # Blocks of a few elements, too.
        least, most = data.draw(st.sampled_from([(1, 1), (16, 40), (1 << 18, 1 << 23)]))
        with mock.patch.multiple(reading, _MIN_BLOCK=least, _MAX_BLOCK_DERIVED=most):
            done(*words)
        rank = data.draw(st.sampled_from(sorted(rank for rank, tensors in written.items() if tensors)))
        name = data.draw(st.sampled_from(sorted(written[rank])))
        element = data.draw(st.integers(0, written[rank][name].array.size - 1))
        written[rank][name] = flipped(written[rank][name], element * written[rank][name].array.itemsize)
        write_checkpoint(root / "dst" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt", written[rank])
        result = fails(4, *words, "--json")
        assert [(one["kind"], one["parameter"], one["ranks"]) for one in result.json["differences"]] == [
            ("content", name, [rank])
        ]


def shapes(tensors: Mapping[str, Value]) -> dict[str, Any]:
    return {name: tensor.array.shape for name, tensor in tensors.items()}
