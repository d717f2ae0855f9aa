"""strategy make: record for record the strategy of MindSpore's compiler, or an error that lists the missing rules."""

from __future__ import annotations

import errno
import itertools
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.errors import StrategyError
from reshard.strategies import RecordedLayout, read_strategy, read_strategy_file
from reshard.strategies.rules import (
    FullTensor,
    ShardSetting,
    TargetRun,
    make_strategy,
    model_tensors,
    parse_rules,
    parse_sizes,
)
from tests import cases, made_cases
from tests.corpus import CORPUS
from tests.faults import failing
from tests.running import Argument, done, fails, reshard
from tests.strategy_writing import layout, write_strategy
from tests.trees import Value, cut_ranks, tree_bytes, write_checkpoint, write_tree

Said = tuple[Argument, ...]
CASES = made_cases.case_names()
PANGU = CORPUS / "pangu_alpha_2.6B" / "strategy.ckpt"


def write_shapes(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A JSON strategy of one device, which records only shapes."""
    return write_strategy(
        path, 0, {name: layout([1], [-1] * len(shape), shape=list(shape)) for name, shape in shapes.items()}
    )


def as_recorded(path: Path) -> dict[str, RecordedLayout]:
    return dict(read_strategy_file(str(path)).layouts)


@pytest.mark.parametrize("name", CASES)
def test_a_made_strategy_equals_the_compiled_one(name: str) -> None:
    case = made_cases.load(name)
    strategy = make_strategy(parse_rules(case.rules, "rules"), case.model, case.target, "rules")
    assert {stage.number: stage.layouts for stage in strategy} == case.compiled()


@pytest.mark.parametrize("name", ["10_dp2mp2pp2", "20_llama_dp1mp4pp2_uneven", "27_mcoremoe_dp2mp4ep8pp1"])
@pytest.mark.parametrize("ending", ["ckpt", "json"])
def test_the_command_makes_the_compiled_strategy_in_every_file_format(name: str, ending: str, tmp_path: Path) -> None:
    case = made_cases.load(name)
    rules = tmp_path / "rules.toml"
    rules.write_text(case.rules)
    full = {tensor.name: Value(tensor.dtype or "", np.zeros(tensor.shape, "<u4")) for tensor in case.tensors}
    shapes = write_checkpoint(tmp_path / "full.safetensors", full)
    options: Said = ("--shapes", shapes, "--sizes", case.sizes_text, *case.options())
    done("strategy", "make", rules, tmp_path / f"merged.{ending}", *options)
    done("strategy", "make", rules, tmp_path / "stages", *options)
    for created in (tmp_path / f"merged.{ending}", tmp_path / "stages"):
        compared = done("strategy", "diff", case.strategy, created, "--json").json["summary"]
        assert compared.pop("unchanged") == len({name for stage in case.compiled().values() for name in stage})
        assert not any(compared.values())
    of_stages = sorted(path.name for path in (tmp_path / "stages").glob("*.ckpt"))
    assert of_stages == sorted(path.name for path in case.strategy.iterdir())


@pytest.mark.parametrize("name", ["07_layout8_opt", "08_pp2dp2mp2"])
def test_made_json_equals_mindspores(name: str, tmp_path: Path) -> None:
    """Full shapes, and an entry per device axis where a dimension has several."""
    case = made_cases.load(name)
    rules = tmp_path / "rules.toml"
    rules.write_text(case.rules)
    full = {tensor.name: Value(tensor.dtype or "", np.zeros(tensor.shape, "<u4")) for tensor in case.tensors}
    shapes = write_checkpoint(tmp_path / "full.ckpt", full)
    out = tmp_path / "out.json"
    done("strategy", "make", rules, out, "--shapes", shapes, "--sizes", case.sizes_text, *case.options())
    theirs = [json.loads(path.read_text()) for path in sorted((case.path / "strategy_json").glob("*.json"))]
    assert theirs
    expected = {
        name if len(theirs) == 1 else f"{stage}-{name}": item
        for stage, content in enumerate(theirs)
        for name, item in content["parallel_layout_item"].items()
    }
    assert json.loads(out.read_text())["parallel_layout_item"] == expected


@pytest.mark.skipif(not PANGU.is_file(), reason="the whole corpus is not on this machine")
def test_eight_rules_make_a_production_strategy_record_for_record() -> None:
    rules = """
[[parameter]]
match = ["*.attention.dense?.weight", "*.attention.projection.weight", "*.output.projection.weight"]
map = ["mp", "None"]
[[parameter]]
match = ["*.attention.dense?.bias", "*.output.mapping.bias"]
map = ["mp"]
[[parameter]]
match = "*.output.mapping.weight"
map = ["None", "mp"]
[[parameter]]
match = "*"
map = "None"
optimizer_shard = false
"""
    compiled = as_recorded(PANGU)
    tensors = [FullTensor(name, pangu_shape(name, record), "Float32") for name, record in compiled.items()]
    model = model_tensors("shapes", tensors, ITEM_SIZES)
    target = TargetRun(parse_sizes("dp=64,mp=8"), ShardSetting(-1, 0))
    (strategy,) = make_strategy(parse_rules(rules, "rules"), model, target, "rules")
    assert strategy.layouts == compiled
    assert len(compiled) == 1551


def pangu_shape(name: str, record: RecordedLayout) -> tuple[int, ...]:
    """Full shapes of the model of 2.6 billion parameters, from its paper: hidden 2560, four times that inside."""
    if "embedding_table" in name:
        return (40000 if "word" in name else 1024, 2560)
    wide = ".output.mapping." in name
    if name.endswith("weight"):
        return (2560, 10240) if wide else (10240, 2560) if ".output.projection." in name else (2560, 2560)
    return (10240,) if wide else (2560,)


# What does not follow.


def making(tmp_path: Path, rules: str, shapes: Mapping[str, tuple[int, ...]], *options: Any) -> tuple[Any, ...]:
    (tmp_path / "rules.toml").write_text(rules)
    return (
        "strategy",
        "make",
        tmp_path / "rules.toml",
        tmp_path / "out.ckpt",
        "--shapes",
        write_shapes(tmp_path / "shapes.json", shapes),
        *options,
    )


ONE_RULE = '[[parameter]]\nmatch = "*"\nmap = ["mp", "None"]\n'


@pytest.mark.parametrize(
    ("rules", "sizes", "texts"),
    [
        (ONE_RULE, "dp=3,mp=4", "12 devices; MindSpore's compiler takes 1, 2, 4 or a multiple of 8"),
        (ONE_RULE, "dp=3,mp=4,pp=2", "ranks 0,4,8 as a group, which MindSpore's compiler refuses"),
        (ONE_RULE, "dp=1,mp=16", "dimension 0 of size 8 does not divide by mp = 16"),
        (ONE_RULE, "dp=2,mp=4,cp=2,ep=2", "ep=2 cuts no parameter"),
        ('[[parameter]]\nmatch = "*"\nmap = "None"\n', "dp=2,mp=4", "mp=4 cuts no parameter"),
        ('[[parameter]]\nmatch = "*"\nmap = ["mp"]\n', "mp=4", "map has 1 entries, and the tensor 2 dimensions"),
        ('[[parameter]]\nmatch = "*"\nmap = ["mp", "mp"]\n', "mp=4", "mp cuts two dimensions"),
        ('[[parameter]]\nmatch = "*"\nmatrix = ["dp"]\nmap = ["mp", "None"]\n', "mp=4", "is not the 4 devices"),
        ('[[parameter]]\nmatch = "*"\nmap = ["tp", "None"]\n', "mp=4", "tp has no size; write mp"),
        ('[[parameter]]\nmatch = "*"\nmap = ["mp", "none"]\n', "mp=4", "'none' is written \"None\""),
        ('[[parameter]]\nmatch = "*"\nmap = [["mp", "dp"], "None"]\n', "dp=2,mp=4", "nested = true"),
        ('[[parameter]]\nmatch = "*"\nmap = ["ep", "None"]\n', "mp=4,ep=2", "ep is not an axis of the matrix"),
        ('shown_for = "mp<=2"\n' + ONE_RULE, "mp=4", "'shown_for' is unknown"),
        (ONE_RULE + 'optimizer_shard = "mp<=2"\n', "mp=4", 'optimizer_shard must be true, false, or "uncapped"'),
        ('[[parameter]]\nmatch = "*"\nmap = ["min(mp,1)", "None"]\n', "mp=4", "mp=4 cuts no parameter"),
        ('[[parameter]]\nmatch = "*"\nmap = ["mp?", "None"]\n', "dp=1,mp=16", "mp=16 cuts no parameter"),
        ('[[parameter]]\nmatch = "*"\nmap = ["None|mp", "None"]\n', "mp=4", 'map = ["mp", "None"]'),
        (
            '[[parameter]]\nmatch = "*"\nmatrix = [["dp", "mp"], ["mp", "dp"]]\nmap = ["mp", "None"]\n',
            "dp=2,mp=4",
            'matrix = ["mp", "dp"]',
        ),
        ('[[parameter]]\nmatch = "*"\nmpa = ["mp", "None"]\n', "mp=4", "'mpa' is unknown. Did you mean map?"),
        ('[[parameter]]\nmap = ["mp", "None"]\n', "mp=4", "match is missing"),
        ("[[parameter]\n", "mp=4", "is not TOML"),
        ('[[parameter]]\nmatch = "*"\nmap = ["mp+cp", "None"]\n', "mp=4", "is not a product of sizes"),
    ],
)
def test_undecided_and_uncompilable_layouts_are_refused(rules: str, sizes: str, texts: str, tmp_path: Path) -> None:
    shapes = {f"layers.{layer}.w": (8, 8) for layer in range(2)}
    fails(3, *making(tmp_path, rules, shapes, "--sizes", sizes, "--weights-only"), texts=[texts])
    assert not (tmp_path / "out.ckpt").exists()


def test_rules_may_leave_irrelevant_settings_open(tmp_path: Path) -> None:
    """With data parallelism alone nothing is cut; with one replica the order of devices is irrelevant."""
    open_cut = '[[parameter]]\nmatch = "*"\nmap = ["None|mp", "None"]\n'
    done(*making(tmp_path, open_cut, {"w": (8, 8)}, "--sizes", "dp=8", "--weights-only"))
    open_order = '[[parameter]]\nmatch = "*"\nmatrix = [["dp", "mp"], ["mp", "dp"]]\nmap = ["mp", "None"]\n'
    done(*making(tmp_path, open_order, {"w": (8, 8)}, "--sizes", "mp=8", "--weights-only", "--overwrite"))
    assert as_recorded(tmp_path / "out.ckpt")["w"] == RecordedLayout((8,), ((0, -1),))


def test_stages_of_parameters_outside_layers_are_required(tmp_path: Path) -> None:
    shapes = {"embed": (8, 8), **{f"layers.{layer}.w": (8, 8) for layer in range(5)}, "head": (8, 8)}
    options: Said = ("--sizes", "mp=4,pp=2", "--weights-only")
    fails(2, *making(tmp_path, ONE_RULE, shapes, *options), texts=["5 layers do not divide", "--layers-per-stage 3,2"])
    options = (*options, "--layers-per-stage", "2,3")
    fails(
        3,
        *making(tmp_path, ONE_RULE, shapes, *options),
        texts=["2 parameters outside the layers", 'first = ["embed", "'],
    )
    stages = '[pipeline]\nfirst = "embed"\nlast = "head"\n'
    done(*making(tmp_path, stages + ONE_RULE, shapes, *options))
    shown = done("strategy", "show", tmp_path / "out.ckpt", "--json").json
    assert {row["parameter"]: row["stage"] for row in shown} == {
        "embed": 0,
        "layers.0.w": 0,
        "layers.1.w": 0,
        "layers.2.w": 1,
        "layers.3.w": 1,
        "layers.4.w": 1,
        "head": 1,
    }
    options = ("--sizes", "mp=4,pp=2", "--weights-only", "--overwrite", "--layers-per-stage", "1,1,2,1")
    done(*making(tmp_path, stages + ONE_RULE, shapes, *options))
    shown = done("strategy", "show", tmp_path / "out.ckpt", "layers.*", "--json").json
    assert sorted((row["parameter"], row["stage"]) for row in shown) == [
        ("layers.0.w", 0),
        ("layers.1.w", 1),
        ("layers.2.w", 0),
        ("layers.3.w", 0),
        ("layers.4.w", 1),
    ]


def test_numbers_in_several_places_are_not_layers(tmp_path: Path) -> None:
    shapes = {f"{part}.{number}.w": (8, 8) for part in ("encoder", "decoder") for number in range(2)}
    options = ("--sizes", "mp=4,pp=2", "--weights-only")
    fails(
        3, *making(tmp_path, ONE_RULE, shapes, *options), texts=['layers = ["encoder.{layer}.*", "decoder.{layer}.*"]']
    )


def test_the_optimizer_is_required(tmp_path: Path) -> None:
    options = ("--sizes", "dp=2,mp=4", "--optimizer-shards", "-1", "--optimizer-threshold", "0")
    fails(3, *making(tmp_path, ONE_RULE, {"w": (8, 8)}, *options), texts=["no optimizer state", "--weights-only"])
    done(*making(tmp_path, 'optimizer_states = ["adam_m", "adam_v"]\n' + ONE_RULE, {"w": (8, 8)}, *options))
    assert list(as_recorded(tmp_path / "out.ckpt")) == ["w", "adam_m.w", "adam_v.w"]


def test_the_dtype_is_required_where_it_decides(tmp_path: Path) -> None:
    options = ("--sizes", "dp=2,mp=4", "--optimizer-shards", "-1", "--optimizer-threshold", "1", "--weights-only")
    shapes = {"small": (8, 4), "middle": (16, 32), "large": (64, 64)}
    fails(3, *making(tmp_path, ONE_RULE, shapes, *options), texts=["1 parameter: 'middle'", 'dtype = "Float32"'])
    for dtype, sharded in (("Float32", True), ("fp32", True), ("bf16", True), ("Int8", False)):
        stated = f'[[parameter]]\nmatch = "*"\ndtype = "{dtype}"\n'
        done(*making(tmp_path, stated + ONE_RULE, shapes, *options, "--overwrite"))
        actual = as_recorded(tmp_path / "out.ckpt")
        assert {name: layout.shard_size != 0 for name, layout in actual.items()} == {
            "small": False,
            "middle": sharded,
            "large": True,
        }


@pytest.mark.parametrize("out", ["{rank}.ckpt", "stages/rank_{rank}/s.json", "out.pb"])
def test_other_names_of_output_are_wrong_usage(out: str, tmp_path: Path) -> None:
    words = list(making(tmp_path, ONE_RULE, {"w": (8, 8)}, "--sizes", "mp=4", "--weights-only"))
    words[3] = tmp_path / out
    fails(2, *words, texts=["named .ckpt or .json; a directory for a file per stage"])


def test_existing_output_is_refused_without_overwrite(tmp_path: Path) -> None:
    options = ("--sizes", "mp=4", "--weights-only")
    done(*making(tmp_path, ONE_RULE, {"w": (8, 8)}, *options))
    before = tree_bytes(tmp_path)
    done(*making(tmp_path, ONE_RULE, {"w": (8, 8)}, *options))
    assert tree_bytes(tmp_path) == before
    fails(3, *making(tmp_path, ONE_RULE, {"v": (8, 8)}, *options), texts=["exists with other content", "--overwrite"])
    (tmp_path / "out.ckpt").write_text("a letter")
    fails(3, *making(tmp_path, ONE_RULE, {"w": (8, 8)}, *options, "--overwrite"), texts=["it is not replaced"])


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ("set = 1", "set must be a list of tables"),
        ('set = [{ map = ["None", "None"] }]', "must have one switch"),
        ("set = [{ a = true, b = true }]", "must have one switch"),
        ("set = [{ a = [1] }]", "must have one switch"),
        ('set = [{ a = true, map = "mp" }]', "map must be a list"),
    ],
)
def test_switches_without_effect_are_refused(options: str, texts: str, tmp_path: Path) -> None:
    rules = ONE_RULE + options + "\n"
    fails(3, *making(tmp_path, rules, {"w": (8, 8)}, "--sizes", "mp=4", "--weights-only"), texts=[texts])


def test_a_weight_whose_name_ends_like_another_is_not_optimizer_state(tmp_path: Path) -> None:
    shapes = {name: (8, 8) for name in ("norm.weight", "mtp.norm.weight", "head.w", "linear.head.w", "adam_m.head.w")}
    shapes["linear.head.w"] = (16, 8)
    done(*making(tmp_path, ONE_RULE, shapes, "--sizes", "mp=4", "--weights-only"))
    assert set(as_recorded(tmp_path / "out.ckpt")) == set(shapes) - {"adam_m.head.w"}
    done(*making(tmp_path, ONE_RULE, shapes, "--sizes", "mp=4", "--overwrite"))
    assert set(as_recorded(tmp_path / "out.ckpt")) == set(shapes)


def test_a_suffix_of_most_weights_is_optimizer_state(tmp_path: Path) -> None:
    shapes = {f"{prefix}{name}": (8, 8) for prefix in ("", "own_m.") for name in ("w", "v")}
    done(*making(tmp_path, ONE_RULE, shapes, "--sizes", "mp=4", "--weights-only"))
    assert set(as_recorded(tmp_path / "out.ckpt")) == {"w", "v"}


def test_optimizer_state_of_another_shape_does_not_get_the_layout_of_its_weight(tmp_path: Path) -> None:
    shapes = {"w": (8, 8), "exp_avg_sq_row.w": (8,)}
    texts = ["'exp_avg_sq_row.w'", "its cut is unknown", "--weights-only"]
    fails(3, *making(tmp_path, ONE_RULE, shapes, "--sizes", "mp=4"), texts=texts)
    done(*making(tmp_path, ONE_RULE, shapes, "--sizes", "mp=4", "--weights-only"))
    assert set(as_recorded(tmp_path / "out.ckpt")) == {"w"}


def test_overwrite_removes_stages_of_another_strategy(tmp_path: Path) -> None:
    """They would be read as further stages of it."""
    shapes = {f"layers.{layer}.w": (8, 8) for layer in range(4)}
    words = list(making(tmp_path, ONE_RULE, shapes, "--weights-only", "--sizes"))
    words[3] = f"{tmp_path}/stages/"
    done(*words, "mp=4,pp=4")
    done(*words, "mp=4,pp=4", "--overwrite")
    before = tree_bytes(tmp_path)
    fails(
        3, *words, "mp=4,pp=2", "--overwrite", texts=["2 strategy files that would be read as stages, too", "12.ckpt"]
    )
    assert tree_bytes(tmp_path) == before
    shutil.rmtree(tmp_path / "stages")
    done(*words, "mp=4,pp=2")


@pytest.mark.deep
@pytest.mark.parametrize("replaces", [False, True])
def test_stages_of_an_interrupted_run_are_never_read_as_a_strategy(replaces: bool, tmp_path: Path) -> None:
    """After any last system call the file is the old strategy, the new one, or refused."""
    shapes = {f"layers.{layer}.w": (8, 8) for layer in range(6)}
    words = list(making(tmp_path, ONE_RULE, shapes, "--weights-only", "--sizes", "mp=2,pp=4", "--layers-per-stage"))
    words[3] = stages = tmp_path / "stages"

    def layers() -> list[list[str]]:
        return [list(stage.layouts) for stage in read_strategy(str(stages)).stages]

    done(*words, "1,2,1,2")
    old = layers() if replaces else None
    files = tree_bytes(stages)
    shutil.rmtree(stages)
    words = [*words, "2,1,2,1", *(["--overwrite"] if replaces else [])]
    for kind, number in (("names", errno.EIO), ("write", errno.ENOSPC)):
        for at in itertools.count(1):
            shutil.rmtree(stages, ignore_errors=True)
            for name, data in files.items() if replaces else ():
                (stages / name).parent.mkdir(parents=True, exist_ok=True)
                (stages / name).write_bytes(data)
            with failing(kind, tmp_path, at, number) as faults:
                status = reshard(*words).status
            try:
                actual = layers()
            except StrategyError:
                actual = None
            done(*words)
            new = layers()
            assert actual in (old, new, None)
            assert [len(layers) for layers in new] == [2, 1, 2, 1]
            if faults.calls < at:
                assert status == 0
                assert at > 4
                break


def test_the_record_beside_a_made_strategy_contains_its_rules(tmp_path: Path) -> None:
    done(*making(tmp_path, ONE_RULE, {"w": (8, 8)}, "--sizes", "mp=4", "--weights-only"))
    record = json.loads((tmp_path / "out.ckpt.made").read_text())
    assert record["rules"] == ONE_RULE
    assert record["sizes"] == {"dp": 1, "mp": 4, "pp": 1, "cp": 1, "ep": 1}
    # In a directory of strategies it is none.
    assert done("strategy", "show", tmp_path / "out.ckpt").out
    assert done("rank-list", "0", "--src-strategy", tmp_path / "out.ckpt", "--dst-strategy", "none").out == "0 1 2 3\n"


SIZES = st.sampled_from([1, 2, 4, 8])


@given(dp=SIZES, cp=SIZES, mp=SIZES, outer=st.booleans(), shards=st.sampled_from([0, -1, 2, 4]), rows=st.booleans())
def test_every_rank_has_the_slice_of_its_rule(dp: int, cp: int, mp: int, outer: bool, shards: int, rows: bool) -> None:
    """The record against the meaning of named axes: a rank's coordinates select its slice."""
    devices = dp * cp * mp
    axes = ["mp", "dp", "cp"] if outer else ["dp", "cp", "mp"]
    sizes = {"dp": dp, "cp": cp, "mp": mp}
    entries = ["mp", "None"] if rows else ["None", "mp"]
    text = made_cases.rule("*", axes, entries)
    shape = (512, 512)
    model = model_tensors("shapes", [FullTensor("w", shape, "Float32")], ITEM_SIZES)
    target = TargetRun(parse_sizes(f"dp={dp},cp={cp},mp={mp}"), ShardSetting(shards, 0), weights_only=True)
    assume(shards <= devices)
    (strategy,) = make_strategy(parse_rules(text, "rules"), model, target, "rules")
    actual = strategy.layouts["w"].layout()
    size = min(shards, dp * cp) if shards > 1 else dp * cp if shards else 1
    for rank in range(devices):
        rest, at = rank, {}
        for axis in reversed(axes):
            rest, at[axis] = divmod(rest, sizes[axis])
        replica = at["dp"] * cp + at["cp"]
        cut = [512 // mp * at["mp"], 512 // mp * (at["mp"] + 1)] if mp > 1 else [0, 512]
        expected = [cut, [0, 512]] if rows else [[0, 512], cut]
        first, last = expected[0]
        part = (last - first) // size
        expected[0] = [first + part * (replica % size), first + part * (replica % size + 1)]
        box = actual.slice_box(shape, int(actual.slice_of_rank[rank]))
        assert [list(interval) for interval in box] == expected
    assert math.prod(actual.device_matrix) == devices


# Conversions to strategies that were made.


@pytest.mark.deep
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("10o_dp2mp4pp1_optm1", "10_dp1mp4pp1"),
        ("10_dp2mp4pp1", "10o_dp2mp2pp2_optm1"),
        ("10o_dp2mp2pp2_optm1", "10_dp1mp2pp4"),
    ],
)
@pytest.mark.parametrize("weights_only", [True, False])
def test_conversions_to_a_made_and_a_compiled_strategy_are_equal(
    source: str, target: str, weights_only: bool, tmp_path: Path
) -> None:
    """With optimizer state and without, to and from pipelines, full shapes from the source's own ranks."""
    before, after = cases.load(source), made_cases.load(target)
    full = {name: of for name, of in before.full().items() if not name.startswith("accu_grads.")}
    src = write_tree(tmp_path / "src", cut_ranks(before.strategy, full))
    rules = tmp_path / "rules.toml"
    rules.write_text(after.rules)
    shapes = ("--shapes", src, "--src-strategy", before.directory)
    options = [*after.options(), *(["--weights-only"] if weights_only else [])]
    done("strategy", "make", rules, tmp_path / "made.ckpt", *shapes, "--sizes", after.sizes_text, *options)
    only = ["--exclude", "adam_*", "--exclude", "accu_grads.*"] if weights_only else []
    for out, strategy in (("made", tmp_path / "made.ckpt"), ("compiled", after.strategy)):
        words: Said = ("--src-strategy", before.directory, "--dst-strategy", strategy, "--quiet", *only)
        done("transform-dir", src, tmp_path / out, *words)
    files = tree_bytes(tmp_path / "made")
    assert files and files == tree_bytes(tmp_path / "compiled")
    done("strategy", "check", before.directory, src)
    done("strategy", "check", tmp_path / "made.ckpt", tmp_path / "made")


def test_the_first_rule_that_matches_decides_whether_a_parameter_is_trained() -> None:
    text = 'optimizer_states = "adam_m"\n' + '[[parameter]]\nmatch = "frozen"\nmap = ["mp", "None"]\ntrained = false\n'
    text += '[[parameter]]\nmatch = "*"\nmap = ["mp", "None"]\n'
    model = model_tensors("shapes", [FullTensor(name, (8, 8), "Float32") for name in ("frozen", "w")], ITEM_SIZES)
    [strategy] = make_strategy(
        parse_rules(text, "rules"), model, TargetRun(parse_sizes("mp=2"), ShardSetting(0)), "rules"
    )
    assert set(strategy.layouts) == {"frozen", "w", "adam_m.w"}
