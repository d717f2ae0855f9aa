"""rank-list of a checkpoint: the files that a conversion reads for a target, for all forms and names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.convert.test_models import World
from tests.corpus import FIXTURES
from tests.running import Argument, done, fails

DEMO = FIXTURES / "demo"
STRATEGIES: list[Argument] = [
    *("--src-strategy", DEMO / "src_strategy.ckpt"),
    *("--dst-strategy", DEMO / "dst_strategy.ckpt"),
]


def planned(*words: Argument) -> dict[int, list[int]]:
    """Per target file the source files that it is made of."""
    targets = done("plan", *words, "--json").json["targets"]
    return {target["rank"]: [source["rank"] for source in target["sources"]] for target in targets}


def test_rank_list_of_a_source_equals_that_of_its_strategies() -> None:
    for rank in range(4):
        alone = done("rank-list", rank, *STRATEGIES, "--json").json
        assert done("rank-list", rank, "--src", DEMO / "src_checkpoints", *STRATEGIES, "--json").json == alone


@pytest.mark.parametrize("way", ["to ranks", "to Hugging Face"])
def test_rank_list_with_names_equals_the_plan(tmp_path: Path, way: str) -> None:
    world = World(tmp_path, "qwen3_moe")
    done("convert", *world.convert)
    words: list[Argument] = world.convert[2:]
    source = world.hf
    if way == "to Hugging Face":
        source = tmp_path / "ranks"
        words = ["--src-strategy", world.d, "--names", world.names, "--config", world.hf / "config.json"]
        words += ["--to", "huggingface", "--max-shard-size", "4KB"]
    expected = planned(source, tmp_path / "out", *words)
    assert way == "to ranks" or len(set(map(tuple, expected.values()))) > 1
    for number, files in expected.items():
        assert done("rank-list", number, "--src", source, *words, "--json").json == {"rank": number, "ranks": files}


def test_source_options_of_rank_list_without_a_source_are_wrong_usage() -> None:
    fails(2, "rank-list", 1, *STRATEGIES, "--names", "qwen3", texts=["--names", "--src SRC"])
    fails(2, "rank-list", 1, *STRATEGIES, "--to", "unified", texts=["--to", "--src SRC"])
    source: list[Argument] = ["--src", DEMO / "src_checkpoints"]
    fails(2, "rank-list", 1, *STRATEGIES, "--available", "0-3", texts=["--available", "--without-ranks"])
    fails(2, "rank-list", 4, *source, *STRATEGIES, texts=["out of range"])
    fails(2, "rank-list", 9, *source, *STRATEGIES[:2], "--to", "unified", texts=["out of range"])
