"""RANK and --ranks are numbers of target files where the target has no rank directories."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.forms import FORMS
from tests.running import Argument, done, fails
from tests.small import COPIED
from tests.trees import cut_ranks, layout, single, value, write_strategy, write_tree

FULL = {name: value(name, (8, 4)) for name in ("net.a.w", "net.b.w", "adam_m.net.a.w")}
ROWS = single(dict.fromkeys(FULL, layout([2], [0, -1])))
FILES = [form for form in FORMS if form != "ranks"]
CUT = ("checkpoint2", "hf-sharded", "dcp", "hyper-parallel")


def source(root: Path) -> tuple[Path, Path]:
    """Rank directories and their strategy."""
    return write_tree(root / "src", cut_ranks(ROWS, FULL, COPIED)), write_strategy(root / "s", ROWS)


def to(form: str, strategy: Path) -> list[Argument]:
    words: list[Argument] = ["--to", form, "--src-strategy", strategy]
    if form in ("dcp", "hyper-parallel"):
        words += ["--rename", "*=*"]
    return [*words, *(["--dst-strategy", strategy] if form in CUT else ["--max-shard-size", "200B"])]


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.safetensors")}


@pytest.mark.deep
@pytest.mark.parametrize("form", FILES)
def test_each_planned_file_can_be_written_alone(form: str, tmp_path: Path) -> None:
    src, strategy = source(tmp_path)
    words = to(form, strategy)
    done("convert", src, tmp_path / "whole", *words)
    files = [target["rank"] for target in done("plan", src, tmp_path / "x", *words, "--json").json["targets"]]
    assert len(files) > 1
    random.Random(form).shuffle(files)
    for file in files:
        done("by-rank", file, src, tmp_path / "one", *words)
    assert contents(tmp_path / "one") == contents(tmp_path / "whole")
    assert (tmp_path / "one" / "reshard-manifest.json").exists()
    target: list[Argument] = ["--dst-strategy", strategy] if form == "checkpoint2" else []
    done("verify", tmp_path / "one", "--src", src, "--src-strategy", strategy, *target)


@pytest.mark.parametrize("form", FILES)
def test_file_numbers_out_of_range_are_refused(form: str, tmp_path: Path) -> None:
    src, strategy = source(tmp_path)
    words = to(form, strategy)
    count = len(done("plan", src, tmp_path / "x", *words, "--json").json["targets"])
    texts = [f"file {count} (RANK, --ranks) is out of range: {count} files would be written, 0 to {count - 1}"]
    fails(2, "convert", src, tmp_path / "out", *words, "--ranks", f"0-{count}", texts=texts)
    fails(2, "by-rank", count, src, tmp_path / "out", *words, texts=texts)


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("damage", ["contradiction", "lost rank"])
def test_some_files_are_refused_where_all_files_are(form: str, damage: str, tmp_path: Path) -> None:
    src, strategy = source(tmp_path)
    if damage == "lost rank":
        shutil.rmtree(src / "rank_1")
    else:
        ranks = cut_ranks(ROWS, FULL, COPIED)
        ranks[1]["net.b.w"] = value("net.b.w", (2, 4))
        shutil.rmtree(src)
        write_tree(src, ranks)
    words = to(form, strategy)
    if form == "checkpoint2":
        # A file of the first stage needs nothing of the contradicting parameter.
        halves = [
            {name: layout([2], [-1, -1]) for name in FULL if "net.b" not in name},
            {"net.b.w": layout([2], [-1, -1])},
        ]
        words[-1] = write_strategy(tmp_path / "d", [{"devices": 2, "layouts": half} for half in halves])
    fails(3, "convert", src, tmp_path / "out", *words, texts=["net.b.w"])
    fails(3, "convert", src, tmp_path / "out", *words, "--ranks", "0", texts=["net.b.w"])
    fails(3, "by-rank", 0, src, tmp_path / "out", *words, texts=["net.b.w"])
    assert not list((tmp_path / "out").rglob("*.safetensors"))
