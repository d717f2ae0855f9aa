"""stats and diff from the command line: forms, layouts, exit statuses, pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.running import Argument, done, fails, reshard, warns
from tests.small import COPIED, World, tensors
from tests.trees import (
    Value,
    cut_ranks,
    layout,
    read_checkpoint,
    single,
    text,
    value,
    write_checkpoint,
    write_strategy,
    write_tree,
)


def stats(path: Path, *options: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = done("stats", path, *options, "--json").json["tensors"]
    return rows


def test_statistics_are_the_same_in_every_layout_and_form(saved: World) -> None:
    expected = {row["name"]: row for row in stats(saved.src, "--strategy", saved.old)}
    for name, (_, array) in tensors().items():
        numbers = array.view("<f4").astype("f8")
        row = expected[name]
        assert (row["count"], row["min"], row["max"]) == (array.size, numbers.min(), numbers.max())
        assert row["norm"] == pytest.approx(np.linalg.norm(numbers)) and row["mean"] == pytest.approx(numbers.mean())
    assert expected["global_step"]["max"] == 41
    old = ("--src-strategy", saved.old)
    done("convert", saved.src, saved.dst, *old, "--dst-strategy", saved.new)
    done("convert", saved.src, saved.root / "hf", *old, "--to", "huggingface")
    done("convert", saved.src, saved.root / "c2", *old, "--to", "checkpoint2", "--dst-strategy", saved.new)
    assert stats(saved.dst, "--strategy", saved.new) == [*expected.values()]
    assert stats(saved.root / "hf") == [*expected.values()]
    actual = {row["name"]: row for row in stats(saved.root / "c2")}
    assert all(actual[name] == expected[name] for name in tensors())
    assert done("stats", saved.root / "hf", "--json").json["form"] == "huggingface"


def test_stats_and_diff_refuse_files_with_a_wrong_crc(saved: World) -> None:
    """Where one copy of each slice is read, the file whose copies are not read does not count."""
    replicas = single({name: layout([2], [-1, -1]) for name in ("w", "m.w")})
    old, src = write_strategy(saved.root / "replicas", replicas), saved.root / "crc"
    write_tree(src, cut_ranks(replicas, {name: tensors()[name] for name in ("w", "m.w")}), crc=True)
    path = sorted(src.rglob("*.ckpt"))[1]
    content = tensors()["w"].array.tobytes()
    path.write_bytes(path.read_bytes().replace(content, bytes([content[0] ^ 1]) + content[1:]))
    done("stats", src, "--strategy", old)
    failing = ("stats", src, "--strategy", old, "--fail-on", "nan,inf")
    fails(3, *failing, texts=[path, "CRC", "--crc never"])
    done(*failing, "--crc", "never")
    fails(3, "stats", src, "--strategy", old, "--without-ranks", 0, texts=[path, "CRC"])
    sides = ("diff", path, saved.src, "--a-strategy", "none", "--b-strategy", saved.old)
    fails(3, *sides, texts=[path, "CRC", "--crc never"])
    done(*sides, "--crc", "never")
    fails(3, "diff", saved.src, path, "--a-strategy", saved.old, "--b-strategy", "none", texts=[path, "CRC"])


def test_stats_lists_every_tensor_and_the_totals(saved: World) -> None:
    output = done("stats", saved.src, "--strategy", saved.old, "--exclude", "m.*").out
    assert "w" in output and "m.w" not in output and "[8,6]" in output
    assert output.rstrip().splitlines()[-1].startswith("3 tensors, 53 elements: 0 NaN")


def test_fail_on_lists_tensors_with_nan_or_inf(tmp_path: Path) -> None:
    numbers = np.array([1, np.nan, np.inf, 0], "<f4").view("<u4")
    path = write_checkpoint(tmp_path / "w.ckpt", {"bad": Value("Float32", numbers), "texts": text("nan")})
    good = write_checkpoint(tmp_path / "g.ckpt", {"w": Value("Float32", numbers[:1])})
    (row,) = stats(path, "--strategy", "none")
    assert (row["nan"], row["inf"], row["zeros"], row["min"], row["max"]) == (1, 1, 1, 0.0, 1.0)
    result = fails(4, "stats", path, "--strategy", "none", "--fail-on", "nan,inf", texts=["NaN in 1 tensor: 'bad'"])
    assert "Inf in 1 tensor: 'bad'" in result.err and "bad" in result.out
    assert reshard("stats", path, "--strategy", "none").status == 0
    assert reshard("stats", good, "--strategy", "none", "--fail-on", "nan,inf").status == 0
    fails(2, "stats", good, "--strategy", "none", "--fail-on", "zero", texts=["neither nan nor inf"])
    no_number = write_checkpoint(tmp_path / "n.ckpt", {"w": Value("Float32", numbers[1:2])})
    assert " - " in done("stats", no_number, "--strategy", "none").out


def plant_nan(path: Path, name: str) -> None:
    """Make the last element of a tensor in a file NaN; everything else stays where it is."""
    data = path.read_bytes()
    content = read_checkpoint(path)[name].array.tobytes()
    assert data.count(content) == 1
    path.write_bytes(data.replace(content, content[:-4] + np.array([np.nan], "<f4").tobytes()))


@pytest.mark.deep
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("name", ["w", "v", "scale"])
def test_fail_on_reads_every_copy(plain: World, rank: int, name: str) -> None:
    copied = {"scale": value("scale", (1,)), "global_step": COPIED["global_step"]}
    plain.save(tensors(names=["w", "v"]), copied=copied)
    words: list[Argument] = ["stats", plain.src, "--strategy", plain.old]
    done(*words, "--fail-on", "nan,inf")
    path = plain.src / f"rank_{rank}" / "net-1_10.ckpt"
    plant_nan(path, name)
    result = fails(4, *words, "--fail-on", "nan", texts=[f"NaN in 1 tensor: '{name}'"])
    assert str(path) in result.out
    renamed = {"w": "model.w"}.get(name, name)
    fails(4, *words, "--fail-on", "nan", "--rename", "w=model.w", texts=[f"NaN in 1 tensor: '{renamed}'"])
    (row,) = [row for row in stats(plain.src, *words[2:], "--fail-on", "inf") if row["name"] == name]
    assert row["nan"] == 1 and row["first_nonfinite"]["rank"] == rank
    if name != "scale":
        done(*words, "--fail-on", "nan", "--without-ranks", rank)


def test_stats_names_the_ranks_whose_copies_are_not_read(plain: World) -> None:
    plain.save(tensors(names=["w", "v"]))
    words: list[Argument] = ["stats", plain.src, "--strategy", plain.old, "--include"]
    warns(done(*words, "w"), "copies on ranks 2-3 were not read", "--fail-on nan,inf")
    warns(done(*words, "v"), "copies on ranks 1-3 were not read")
    assert "not read" not in done(*words, "v", "--fail-on", "nan").err
    assert "not read" not in done(*words, "w", "--without-ranks", "2,3").err


def test_fail_on_reads_every_copy_in_other_forms(plain: World) -> None:
    plain.save(tensors(names=["w", "v"]))
    out = plain.root / "out"
    done("convert", plain.src, out, "--src-strategy", plain.old, "--to", "checkpoint2", "--dst-strategy", plain.old)
    done("stats", out, "--fail-on", "nan")
    holding = [path for path in sorted(out.rglob("*.safetensors")) if "w" in read_checkpoint(path)]
    contents = {path: path.read_bytes() for path in holding}
    assert len(holding) > 1
    for path in holding:
        plant_nan(path, "w")
        assert str(path) in fails(4, "stats", out, "--fail-on", "nan").out
        path.write_bytes(contents[path])


@pytest.mark.parametrize(
    ("dtype", "bits"), [("Float32", 0x7FC00000), ("BFloat16", 0xFF80), ("F8_E5M2", 0x7E), ("Float64", 0x7FF << 52)]
)
def test_stats_locates_the_first_nan_or_inf_in_its_file(tmp_path: Path, dtype: str, bits: int) -> None:
    word = {"Float32": "<u4", "BFloat16": "<u2", "F8_E5M2": "u1", "Float64": "<u8"}[dtype]
    array = np.zeros((8, 6), word)
    array[5, 4] = array[7, 1] = bits
    full = {"a": Value(dtype, np.zeros((8, 6), word)), "b": Value(dtype, array)}
    cuts = single({name: layout([2, 2], [1, 0]) for name in full})
    strategy = write_strategy(tmp_path / "s", cuts, None, "merged")
    write_tree(tmp_path / "src", cut_ranks(cuts, full), "rank_{rank}/net.safetensors")
    # Rows 4 and 5 are of the lower half, column 4 of the right one.
    expected = {"index": [5, 4], "rank": 3, "file": str(tmp_path / "src" / "rank_3" / "net.safetensors")}
    words = (tmp_path / "src", "--strategy", strategy)
    actual = {row["name"]: row["first_nonfinite"] for row in stats(*words)}
    assert actual == {"a": None, "b": expected}
    lines = done("stats", *words).out.splitlines()
    assert lines[0].startswith("b: ") and lines[0].endswith(f"the first at [5,4], {expected['file']}")
    assert [line.split()[0] for line in lines if line.startswith(("a ", "b "))] == ["b", "a"]
    # Turned round, the other one comes first.
    (tmp_path / "t.toml").write_text(
        '[[rule]]\nfrom = "b"\nto = "c"\ndo = "transpose"\n[[rule]]\nfrom = "a"\ndo = "drop"\n'
    )
    (row,) = stats(*words, "--names", tmp_path / "t.toml")
    file = str(tmp_path / "src" / "rank_2" / "net.safetensors")
    assert row["first_nonfinite"] == {"index": [1, 7], "rank": 2, "file": file}


def test_diff_of_a_conversion_and_its_source_is_empty(saved: World) -> None:
    done("convert", saved.src, saved.root / "u", "--src-strategy", saved.old, "--to", "unified")
    result = done("diff", saved.src, saved.root / "u", "--strategy", saved.old, "--exit-code")
    assert "4 tensors, all equal in every byte" in result.out
    assert done("diff", saved.root / "u", saved.src, "--b-strategy", saved.old, "--json").json["equal"]


@pytest.mark.parametrize("sides", [("src", "dst"), ("dst", "src")])
def test_the_strategy_of_diff_does_not_replace_a_recorded_one(saved: World, sides: tuple[str, str]) -> None:
    done("convert", saved.src, saved.dst, "--src-strategy", saved.old, "--dst-strategy", saved.new)
    words: list[Any] = ["diff", *(saved.root / side for side in sides), "--exit-code"]
    result = done(*words, "--strategy", saved.old)
    assert "all equal in every byte" in result.out
    assert f"{saved.dst} is read with its recorded strategy: --{'ab'[sides.index('dst')]}-strategy" in result.err
    # The same strategy in another file needs no note.
    again = done("diff", saved.dst, saved.dst, "--strategy", saved.new, "--exit-code")
    assert "recorded" not in again.err
    # A strategy of one side is used.
    fails(3, *words, "--strategy", saved.old, f"--{'ab'[sides.index('dst')]}-strategy", saved.old, texts=["strategy"])


def test_diff_compares_steps_of_one_checkpoint(plain: World) -> None:
    old, new = tensors(names=["w", "v"]), tensors(names=["w", "v"])
    changed = new["w"].array.copy()
    changed.view("<f4")[3, 2] = 7.5
    new["w"] = Value("Float32", changed)
    plain.save(old, "rank_{rank}/net-1_9.ckpt")
    plain.save(new, "rank_{rank}/net-1_10.ckpt")
    words: list[Any] = ["diff", plain.src, plain.src, "--strategy", plain.old, "--a-step", "1_9"]
    report = done(*words, "--json").json
    (row,) = report["differing"]
    assert (row["name"], row["differing"], row["at"]) == ("w", 1, [3, 2]) and report["identical"] == 2
    before = float(old["w"].array.view("<f4")[3, 2])
    assert row["max_abs"] == pytest.approx(7.5 - before) and row["max_rel"] == pytest.approx((7.5 - before) / 7.5)
    assert (report["a"]["step"], report["b"]["step"]) == ("1_9", "1_10")
    result = reshard(*words, "--exit-code")
    assert result.status == 4 and "[3,2]" in result.out
    assert done(*words).status == 0


def test_diff_lists_names_shapes_and_dtypes_that_differ(tmp_path: Path) -> None:
    def ones(*shape: int) -> Value:
        return Value("Float32", np.full(shape, 0x3F800000, "<u4"))

    one = write_checkpoint(tmp_path / "a.ckpt", {"x": ones(2), "s": ones(2, 3), "t": ones(3), "texts": text("a")})
    half = Value("BFloat16", np.full((3,), 0x3F80, "<u2"))
    other = write_checkpoint(tmp_path / "b.ckpt", {"y": ones(2), "s": ones(3, 2), "t": half, "texts": text("b")})
    output = done("diff", one, other, "--strategy", "none").out
    assert "1 only in A: 'x'" in output and "1 only in B: 'y'" in output and "s: [2,3] in A, [3,2] in B" in output
    assert "Float32 and BFloat16" in output and "2 tensors of 2 differ" in output
    assert reshard("diff", one, other, "--strategy", "none", "--exit-code").status == 4
    cast = done("diff", one, other, "--strategy", "none", "--include", "t", "--cast", "t=BFloat16", "--exit-code")
    assert "all equal" in cast.out


def test_diff_of_checkpoints_without_a_common_name_fails(tmp_path: Path) -> None:
    value = Value("Float32", np.zeros(2, "<u4"))
    one, other = (write_checkpoint(tmp_path / f"{name}.ckpt", {name: value}) for name in "ab")
    for words in ((), ("--exit-code",), ("--json",)):
        result = fails(2, "diff", one, other, "--strategy", "none", *words, texts=["no names in common"])
        assert "only in A" in result.out or words == ("--json",)


def test_a_strategy_of_one_side_is_not_required_of_the_other(saved: World) -> None:
    fails(2, "diff", saved.src, saved.src, texts=["rank files do not record how they are cut"])
    done("convert", saved.src, saved.root / "hf", "--src-strategy", saved.old, "--to", "huggingface")
    fails(2, "diff", saved.root / "hf", saved.src, "--a-strategy", saved.old, texts=["needs no strategy"])


def test_diff_names_the_checkpoint_with_nan(tmp_path: Path) -> None:
    plain = np.array([1.0, 2.0, 3.0], "<f4")
    for name, at in (("a", [1, 2]), ("b", [2])):
        array = plain.copy()
        array[at] = np.nan
        write_checkpoint(tmp_path / f"{name}.ckpt", {"w": Value("Float32", array.view("<u4"))})
    words = (tmp_path / "a.ckpt", tmp_path / "b.ckpt", "--strategy", "none")
    assert "w: 1 NaN in A only; the first at [1]" in done("diff", *words).out
    (row,) = done("diff", *words, "--json").json["differing"]
    assert row["nan"] == [1, 0]
    assert "w: 1 NaN in B only" in done("diff", *words[1::-1], *words[2:]).out
