"""Rules of names and packing, and casts, between any layouts and forms: equal to NumPy on whole arrays."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, note
from hypothesis import strategies as st

from tests.layouts import examples, strategies
from tests.names.test_properties import RandomRule, random_rules
from tests.reference import ONE_DEVICE, Strategy
from tests.running import Argument, done, fails, warns
from tests.trees import (
    Value,
    cut_ranks,
    layout,
    read_checkpoint,
    read_tree,
    same_checkpoints,
    same_ranks,
    single,
    value,
    write_checkpoint,
    write_strategy,
    write_tree,
)

WORDS = {"Float32": "<u4", "BFloat16": "<u2", "Int8": "u1", "Int64": "<u8"}


def values(arrays: dict[str, Any], dtype: str) -> dict[str, Value]:
    """Running numbers as elements of a type; zero stays zero."""
    word = WORDS[dtype]
    if dtype == "Int8":
        return {name: Value(dtype, (array % 251 + (array > 0)).astype(word)) for name, array in arrays.items()}
    return {name: Value(dtype, array.astype(word)) for name, array in arrays.items()}


def shapes_of(full: dict[str, Value]) -> dict[str, Any]:
    return {name: tensor.array.shape for name, tensor in full.items()}


class Side:
    """One end of a conversion: full tensors, a form, and a strategy where it has one."""

    def __init__(self, draw: Any, full: dict[str, Value], forms: list[str]) -> None:
        self.full = full
        self.form = draw(st.sampled_from(forms))
        self.strategy: Strategy = ONE_DEVICE if self.form == "huggingface" else draw(strategies(full))

    def write(self, root: Path) -> list[Argument]:
        """Write it as a source; the options that go with it."""
        if self.form == "huggingface":
            ranks = cut_ranks(self.strategy, self.full)
            names = sorted(self.full)
            half = len(names) // 2
            parts = [names[:half], names[half:]] if half else [names]
            root.mkdir()
            weight_map = {}
            for number, part in enumerate(parts, 1):
                file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
                write_tree(root / "part", {0: {name: self.full[name] for name in part}}, "rank_{rank}/x.safetensors")
                (root / "part" / "rank_0" / "x.safetensors").rename(root / file)
                weight_map.update(dict.fromkeys(part, file))
            (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
            assert ranks
            return []
        write_tree(root, cut_ranks(self.strategy, self.full), "rank_{rank}/net.ckpt")
        strategy = write_strategy(root.parent / "src.ckpt", self.strategy, shapes_of(self.full), "merged")
        return ["--src-strategy", strategy]

    def options(self, root: Path) -> list[Argument]:
        """The options that write it as a target."""
        if self.form == "huggingface":
            return ["--to", "huggingface", "--max-shard-size", "200B"]
        strategy = write_strategy(root / "dst.ckpt", self.strategy, shapes_of(self.full), "merged")
        return ["--dst-strategy", strategy, "--format", "ckpt", "--to", self.form]

    def check(self, root: Path) -> None:
        if self.form == "huggingface":
            tensors: dict[str, Value] = {}
            for path in root.glob("*.safetensors"):
                tensors.update(read_checkpoint(path))
            same_checkpoints(tensors, self.full)
        else:
            same_ranks(read_tree(root), cut_ranks(self.strategy, self.full))


@pytest.mark.deep
@examples(70)
@given(random_rules(), st.data())
def test_any_rules_give_numpys_result_in_any_layout_and_form(rule: RandomRule, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["Float32", "BFloat16", "Int8", "Int64"]))
    forth = data.draw(st.booleans(), label="forth")
    left, right = values(dict(rule.arrays), dtype), values(dict(rule.made), dtype)
    # An element of a tensor of one element is a value, which nothing lays out.
    assume(all(tensor.array.size > 1 for tensor in {**left, **right}.values()))
    before, after = (left, right) if forth else (right, left)
    source = Side(data.draw, before, ["ranks", "huggingface"])
    target = Side(data.draw, after, ["ranks", "huggingface"])
    note(f"{source.form} to {target.form}")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "rules.toml").write_text(rule.text)
        (root / "sizes.json").write_text(json.dumps(rule.config))
        words = [*source.write(root / "src"), *target.options(root)]
        done(
            "convert", root / "src", root / "dst", *words, "--names", root / "rules.toml",
            "--config", root / "sizes.json", "--max-memory", data.draw(st.sampled_from(["64K", "16M"])), "--verify",
        )  # fmt: skip
        target.check(root / "dst")


INT4_RULES = [
    ('from = "a.w"\nto = "c.w"\ndo = "transpose"', None),
    ('from = "a.w"\nto = "c.w"\ndo = { reshape = ["r", 4], to = ["r*2", 2] }', None),
    ('from = ["a.w", "b.w"]\nto = "c.w"\ndo = { interleave = 1 }', None),
    ('from = ["a.w", "b.w"]\nto = "c.w"\ndo = { interleave = 0 }', lambda a, b: np.stack([a, b], 1).reshape(16, 8)),
    ('from = ["a.w", "b.w"]\nto = "c.w"\ndo = { concat = 0 }', lambda a, b: np.concatenate([a, b])),
    ('from = ["a.w", "b.w"]\nto = "c.w"\ndo = { concat = 1 }', lambda a, b: np.concatenate([a, b], 1)),
]


@pytest.mark.parametrize(("rule", "expected"), INT4_RULES)
def test_packed_elements_are_moved_by_whole_bytes_or_refused(tmp_path: Path, rule: str, expected: Any) -> None:
    """Two elements of Int4 share a byte; a cut between them is refused."""

    def packed(array: Any) -> Value:
        return Value("Int4", (array[:, 0::2] | array[:, 1::2] << 4).astype("u1"))

    a = np.arange(64).reshape(8, 8) % 15
    arrays = {"a.w": a, "b.w": a[::-1] ^ 1}
    used = {name: array for name, array in arrays.items() if f'"{name}"' in rule}
    write_tree(tmp_path / "src", {0: {name: packed(array) for name, array in used.items()}})
    (tmp_path / "rules.toml").write_text(f"[[rule]]\n{rule}\n")
    words: list[Argument] = ["--src-strategy", "none", "--to", "huggingface", "--names", tmp_path / "rules.toml"]
    if expected is None:
        fails(3, "convert", tmp_path / "src", tmp_path / "dst", *words, texts=["'a.w', which is Int4", '"drop"'])
        return
    done("convert", tmp_path / "src", tmp_path / "dst", *words)
    same_checkpoints(read_checkpoint(tmp_path / "dst" / "model.safetensors"), {"c.w": packed(expected(*used.values()))})


@pytest.mark.deep
@examples(30)
@given(st.data())
def test_renamed_tensors_keep_their_layout(data: st.DataObject) -> None:
    full = {name: Value("Float32", np.arange(48, dtype="<u4").reshape(12, 4)) for name in ("old.a", "old.b", "other")}
    strategy = data.draw(strategies(full))
    renamed = {name.replace("old.", "new."): tensor for name, tensor in full.items()}
    layouts = [
        {**stage, "layouts": {name.replace("old.", "new."): cut for name, cut in stage["layouts"].items()}}
        for stage in strategy
    ]
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_tree(root / "src", cut_ranks(strategy, full), "rank_{rank}/net.ckpt")
        source = write_strategy(root / "src.ckpt", strategy, shapes_of(full), "merged")
        words: list[Argument] = ["--src-strategy", source, "--dst-strategy", "same", "--rename", "old.*=new.*"]
        result = done("convert", root / "src", root / "dst", *words)
        same_ranks(read_tree(root / "dst"), cut_ranks(layouts, renamed))
        # The source's strategy does not list the new names.
        beside = root / "dst" / "reshard-strategy.json"
        warns(result, f"the strategy of these ranks is written to {beside}")
        again: list[Argument] = ["--src-strategy", beside, "--dst-strategy", "same", "--rename", "new.*=old.*"]
        done("convert", root / "dst", root / "once more", *again, "--format", "ckpt", "--verify")
        same_ranks(read_tree(root / "once more"), cut_ranks(strategy, full))
        whole: list[Argument] = ["--src-strategy", beside, "--dst-strategy", "none", "--format", "ckpt"]
        done("convert", root / "dst", root / "whole", *whole)
        same_ranks(read_tree(root / "whole"), {0: renamed})
        even = not any(cut["uneven"] for stage in strategy for cut in stage["layouts"].values())
        if even and len(strategy) == 1:
            # Checkpoint 2.0 cannot record uneven slices, and records stages differently.
            done("convert", root / "src", root / "two", *words, "--to", "checkpoint2")
            back: list[Argument] = ["--dst-strategy", "same", "--rename", "new.*=old.*", "--format", "ckpt"]
            done("convert", root / "two", root / "back", *back)
            same_ranks(read_tree(root / "back"), cut_ranks(strategy, full))


@examples(25)
@given(st.data())
def test_any_cast_is_exact_in_any_layout_and_form(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    shape = data.draw(st.sampled_from([(24, 12), (16, 8), (12, 4, 2), (48,)]))
    elements = {name: random.standard_normal(shape).astype("<f4") for name in ("w.weight", "norm.weight")}
    before = {name: Value("Float32", array.view("<u4")) for name, array in elements.items()}
    half = elements["w.weight"].astype("<f2").view("<u2")
    after = {"w.weight": Value("Float16", half), "norm.weight": before["norm.weight"]}
    source = Side(data.draw, before, ["ranks", "huggingface"])
    target = Side(data.draw, after, ["ranks", "huggingface"])
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        words = [*source.write(root / "src"), *target.options(root)]
        done("convert", root / "src", root / "dst", *words, "--cast", "float16", "--cast", "*norm*=Float32", "--verify")
        target.check(root / "dst")


def test_packed_gradients_are_written_without_an_optimizer_shard(tmp_path: Path) -> None:
    full = {
        f"{prefix}{name}": value(prefix + name, (8, 4))
        for prefix in ("", "adam_m.", "accu_grads.")
        for name in ("m.q.weight", "m.k.weight")
    }
    cut = {"shard_size": -1, "shard_step": 2}
    strategy = single({name: {**layout([2, 2], [0, -1]), **cut} for name in full})
    gradients = [name for name in full if name.startswith("accu_grads.")]
    write_tree(tmp_path / "src", cut_ranks(strategy, full, unsharded=gradients), "rank_{rank}/net.ckpt")
    packed = {
        f"{prefix}m.qk.weight": Value(
            "Float32", np.concatenate([full[f"{prefix}m.{name}.weight"].array for name in "qk"])
        )
        for prefix in ("", "adam_m.", "accu_grads.")
    }
    target = single({name: {**layout([2, 2], [0, -1]), **cut} for name in packed})
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nfrom = ["m.q.weight", "m.k.weight"]\nto = "m.qk.weight"\ndo = { concat = 0 }\n')
    words: list[Argument] = ["--src-strategy", write_strategy(tmp_path / "src", strategy, shapes_of(full), "merged")]
    words += ["--dst-strategy", write_strategy(tmp_path / "dst", target, shapes_of(packed), "merged")]
    words += ["--names", rules, "--optimizer", "keep", "--format", "ckpt", "--verify"]
    done("convert", tmp_path / "src", tmp_path / "out", *words)
    same_ranks(read_tree(tmp_path / "out"), cut_ranks(target, packed, unsharded=["accu_grads.m.qk.weight"]))


@pytest.mark.parametrize("form", ["huggingface", "ranks"])
def test_tensors_without_elements_follow_rules(tmp_path: Path, form: str) -> None:
    full = {"m.w": value("w", (3, 4)), "m.empty": value("empty", (0, 4))}
    write_checkpoint(tmp_path / "src" / "model.safetensors", full)
    (tmp_path / "rules.toml").write_text(
        'others = "keep"\n[[rule]]\nfrom = "m.empty"\nto = "m.turned"\ndo = "transpose"\n'
    )
    words: list[Argument] = ["--to", form, "--names", tmp_path / "rules.toml", "--rename", "m.*=n.*", "--verify"]
    if form == "ranks":
        words += ["--dst-strategy", "none"]
    done("convert", tmp_path / "src", tmp_path / "out", *words)
    (path,) = (tmp_path / "out").rglob("*.safetensors")
    expected = {"n.w": full["m.w"], "n.turned": Value("Float32", full["m.empty"].array.T)}
    same_checkpoints(read_checkpoint(path), expected)


def test_one_of_several_equal_stacks_is_used(tmp_path: Path) -> None:
    stacked = value("stacked", (2, 3))
    write_checkpoint(tmp_path / "src" / "model.safetensors", {"net.a": stacked, "net.b": stacked})
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[rule]]\nfrom = "model.{expert}.w"\nto = ["net.a", "net.b"]\ndo = ["copy", { stack = "expert" }]\n'
    )
    done("convert", tmp_path / "src", tmp_path / "out", "--to", "huggingface", "--names", rules, "--verify")
    (path,) = (tmp_path / "out").glob("*.safetensors")
    expected = {f"model.{number}.w": Value("Float32", stacked.array[number]) for number in range(2)}
    same_checkpoints(read_checkpoint(path), expected)


@pytest.mark.parametrize("dtype", ["Int8", "Complex64"])
def test_a_cast_pattern_that_matches_only_integers_is_refused(tmp_path: Path, dtype: str) -> None:
    full = {"m.scale.weight": value("scale", (4, 4), dtype), "m.w.weight": value("w", (4, 4))}
    write_checkpoint(tmp_path / "src" / "model.safetensors", full)
    words: list[Argument] = ["convert", tmp_path / "src", tmp_path / "out", "--to", "huggingface"]
    fails(3, *words, "--cast", "m.scale.*=Float16", texts=["m.scale.*=Float16", "only floating-point tensors are cast"])
    done(*words, "--cast", "m.*=BFloat16", "--verify")


@pytest.mark.parametrize(
    ("status", "cast", "texts"),
    [
        (3, "steps=Float32", ["only floating-point tensors are cast", "'steps'"]),
        (3, "step=Float32", ["matches no tensor of the target", "did you mean 'steps'?"]),
        (2, "=Float32", ["the pattern of names before = is missing"]),
        (2, "Float32=", ["no type to cast to"]),
        (2, "w=Float33", ["use Float32, Float16 or BFloat16"]),
    ],
)
def test_a_cast_without_a_match_is_an_error(status: int, cast: str, texts: list[str], tmp_path: Path) -> None:
    floats, integers = {"w": np.ones((2, 3)), "v": np.ones(4)}, {"steps": np.ones((2, 2))}
    source = write_checkpoint(tmp_path / "src.safetensors", {**values(floats, "Float32"), **values(integers, "Int64")})
    words: list[Argument] = ["convert", source, tmp_path / "out", "--src-strategy", "none"]
    words += ["--to", "huggingface", "--cast"]
    fails(status, *words, cast, texts=texts)
    # Among others that are cast it stays as it is.
    done(*words, "*=BFloat16", "--cast", "Float16")
    tensors = read_checkpoint(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "w": "Float16",
        "v": "Float16",
        "steps": "Int64",
    }


def test_a_strategy_is_written_beside_ranks_only_where_no_file_contains_it(tmp_path: Path) -> None:
    full = {"m.a.weight": value("a", (8, 4)), "m.b.weight": value("b", (8, 4))}
    strategy = single({"m.a.weight": layout([2, 2], [0, -1]), "m.b.weight": layout([2, 2], [-1, 1])})
    write_tree(tmp_path / "src", cut_ranks(strategy, full), "rank_{rank}/net.ckpt")
    source = write_strategy(tmp_path / "src", strategy, shapes_of(full), "merged")
    words: list[Argument] = ["--src-strategy", source, "--dst-strategy", "same"]
    beside = tmp_path / "out" / "reshard-strategy.json"
    for more in ([], ["--cast", "BFloat16"]):
        done("convert", tmp_path / "src", tmp_path / "out", *words, *more, "--overwrite")
        assert not beside.exists()
    for rank in range(4):
        assert not beside.exists()
        renamed: list[Argument] = ["--rename", "m.*=n.*", "--overwrite"] if not rank else ["--rename", "m.*=n.*"]
        done("by-rank", rank, tmp_path / "src", tmp_path / "ranks", *words, *renamed)
    assert (tmp_path / "ranks" / "reshard-strategy.json").exists()
    done("convert", tmp_path / "src", tmp_path / "out", *words, "--rename", "m.*=n.*", "--overwrite")
    assert beside.read_bytes() == (tmp_path / "ranks" / "reshard-strategy.json").read_bytes()
    # It does not stay with ranks that it does not describe.
    done("convert", tmp_path / "src", tmp_path / "out", *words, "--overwrite")
    assert not beside.exists()

    done("convert", tmp_path / "src", tmp_path / "two", "--to", "checkpoint2", *words)
    done("convert", tmp_path / "two", tmp_path / "back", "--to", "ranks", "--dst-strategy", "same", "--format", "ckpt")
    arguments: list[Argument] = [
        "--src-strategy",
        tmp_path / "back" / "reshard-strategy.json",
        "--dst-strategy",
        "none",
    ]
    done("convert", tmp_path / "back", tmp_path / "whole", *arguments)
    same_ranks(read_tree(tmp_path / "whole"), {0: full})


def test_ranks_of_one_conversion_may_be_written_from_parts_of_the_source(tmp_path: Path) -> None:
    full = {"m.a.weight": value("a", (8, 4)), "m.b.weight": value("b", (8, 4))}
    layouts = {"m.a.weight": layout([2], [0, -1]), "m.b.weight": layout([2], [-1, 0])}
    write_tree(tmp_path / "src", cut_ranks(single(layouts), full), "rank_{rank}/net.ckpt")
    # Strategies list accumulated gradients that are not saved.
    strategy = single({**layouts, "accu_grads.m.a.weight": layout([2], [0, -1])})
    source = write_strategy(tmp_path / "s", strategy, {**shapes_of(full), "accu_grads.m.a.weight": (8, 4)}, "merged")
    shutil.copytree(tmp_path / "src" / "rank_0", tmp_path / "part" / "rank_0")
    words: list[Argument] = ["--src-strategy", source, "--dst-strategy", "same", "--rename", "m.*=n.*"]
    done("by-rank", 0, tmp_path / "part", tmp_path / "out", *words)
    done("by-rank", 1, tmp_path / "src", tmp_path / "out", *words)
    assert done("status", tmp_path / "out", "--json").json["complete"]
    done("verify", tmp_path / "out", "--src", tmp_path / "src")


@pytest.mark.parametrize("command", [("convert",), ("by-rank", 1)])
def test_a_target_strategy_with_an_old_name_is_refused(tmp_path: Path, command: tuple[Argument, ...]) -> None:
    full = {name: value(name, (8, 4)) for name in ("m.a", "m.b", "other")}
    layouts = single({name: layout([4], [0, -1]) for name in full})
    write_tree(tmp_path / "src", cut_ranks(layouts, full))
    strategy = write_strategy(tmp_path / "strategy", layouts)
    words: list[Argument] = [*command, tmp_path / "src", tmp_path / "dst", "--src-strategy", strategy]
    words += ["--dst-strategy", strategy]
    fails(3, *words, "--rename", "m.a=n.a", texts=("lists 'm.a', and --rename names it 'n.a'", "--dst-strategy same"))
    assert not (tmp_path / "dst").exists()
    # Exchanged names are all listed.
    done(*words, "--rename", "m.a=m.b", "--rename", "m.b=m.a")


def test_a_star_in_rename_does_not_match_counters(tmp_path: Path) -> None:
    full = {"a.weight": value("a", (8, 4)), "b.weight": value("b", (8, 4))}
    layouts = {"a.weight": layout([2], [0, -1]), "b.weight": layout([2], [-1, 0])}
    step = {"global_step": Value("Int32", np.array([7], "<i4"))}
    ranks = {rank: {**tensors, **step} for rank, tensors in cut_ranks(single(layouts), full).items()}
    write_tree(tmp_path / "src", ranks, "rank_{rank}/net.ckpt")
    source = write_strategy(tmp_path / "s", single(layouts), shapes_of(full), "merged")
    shutil.copytree(tmp_path / "src" / "rank_0", tmp_path / "part" / "rank_0")
    words: list[Argument] = ["--src-strategy", source, "--dst-strategy", "same", "--rename", "*=model.*"]
    first = done("by-rank", 0, tmp_path / "part", tmp_path / "out", *words)
    assert "1 value not renamed, because * matches tensors only: 'global_step'" in first.err
    done("by-rank", 1, tmp_path / "src", tmp_path / "out", *words, "--verify")
    done("verify", tmp_path / "out", "--src", tmp_path / "src")
    renamed = {rank: {f"model.{name}": one for name, one in tensors.items()} for rank, tensors in ranks.items()}
    for tensors in renamed.values():
        tensors["global_step"] = tensors.pop("model.global_step")
    same_ranks(read_tree(tmp_path / "out"), renamed)


def test_dst_strategy_same_is_another_conversion_than_the_source_strategy(tmp_path: Path) -> None:
    full = {"m.a.weight": value("a", (8, 4)), "m.b.weight": value("b", (8, 4))}
    strategy = single({"m.a.weight": layout([2, 2], [0, -1]), "m.b.weight": layout([2, 2], [-1, 1])})
    write_tree(tmp_path / "src", cut_ranks(strategy, full), "rank_{rank}/net.ckpt")
    source = write_strategy(tmp_path / "src", strategy, shapes_of(full), "merged")
    words: list[Argument] = [tmp_path / "src", tmp_path / "out", "--src-strategy", source]
    words += ["--rename", "m.a.weight=m.b.weight", "--rename", "m.b.weight=m.a.weight"]
    done("by-rank", 0, *words, "--dst-strategy", "same")
    # This strategy cuts the exchanged parameters in another way.
    fails(3, "by-rank", 1, *words, "--dst-strategy", source, texts=["--dst-strategy"])
    done("convert", *words, "--dst-strategy", "same", "--verify")
