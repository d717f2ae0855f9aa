"""--json output has the keys that docs/json.md lists."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from docs.tools.commands import walk
from tests.corpus import FIXTURES, ROOT
from tests.running import done, reshard

DEMO = FIXTURES / "demo"
STRATEGIES = ("--src-strategy", DEMO / "src_strategy.ckpt", "--dst-strategy", DEMO / "dst_strategy.ckpt")
PIPELINE = FIXTURES / "10_dp2mp2pp2" / "strategy"
FULL = FIXTURES / "full_weights" / "h01_bf16_sharded" / "model"
OBJECTS = FIXTURES / "dcp" / "hyper_w2_later" / "checkpoint"
GROUP_INFO = FIXTURES / "01_dp2mp4_adam" / "group_info"


def keys_in(rows: str) -> list[str]:
    """The keys that a cell, or the first cells of a table, list."""
    return re.findall(r"`(\w+)`", rows)


def documented() -> dict[str, list[tuple[bool, list[str]]]]:
    """For every command, whether it prints a list, and the keys: one pair for each kind of document."""
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    cells = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    (summary,) = (index for index, row in enumerate(cells) if row[0] == "| key of a summary")
    (plan,) = (index for index, row in enumerate(cells) if row[0] == "| key of a plan")
    common = {
        "summary": keys_in(" ".join(row[0] for row in cells[summary:plan])),
        "plan": keys_in(" ".join(row[0] for row in cells[plan:])),
    }
    actual: dict[str, list[tuple[bool, list[str]]]] = {}
    for commands, keys, *_ in cells[:summary]:
        named = keys_in(keys)
        if keys.startswith("those of"):
            named += common["summary"] + (common["plan"] if "of a plan" in keys else [])
        for name in re.findall(r"`(reshard [^`]+)`", commands):
            actual.setdefault(name, []).append((keys.startswith("a list"), sorted(named)))
    return actual


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What every command prints with --json, several times where its output has several forms."""
    out = tmp_path_factory.mktemp("json")
    source = DEMO / "src_checkpoints"
    file = next((source / "rank_0").iterdir())
    whole = out / "whole"
    lost = out / "lost"
    shutil.copytree(source, lost)
    printed: dict[str, list[Any]] = {}

    def add(*words: Any, status: int = 0) -> None:
        result = reshard(*words, "--json")
        assert result.status == status, result.err
        name = " ".join(["reshard", *(str(word) for word in words)])
        command = max((reference for reference, _, _ in walk() if f"{name} ".startswith(f"{reference} ")), key=len)
        # A dry run prints the plan.
        printed.setdefault("reshard plan" if "--dry-run" in words else command, []).append(result.json)

    add("convert", source, whole, *STRATEGIES, "--verify", "--checksum", "crc32")
    add("convert", source, out / "text", *STRATEGIES, "--dry-run", "--exclude", "*bias*")
    add("by-rank", 1, source, out / "one", *STRATEGIES, "--dry-run")
    add("by-rank", 1, source, out / "one", *STRATEGIES)
    add("plan", source, out / "one", *STRATEGIES)
    add("resume", out / "one", "--dry-run")
    add("resume", out / "one")
    add("resume", out / "one")
    add("status", out / "one")
    add("status", whole)
    add("rank-list", 1, *STRATEGIES)
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    lora = {f"{stem}.lora_A.weight": np.ones((2, 8), "f4"), f"{stem}.lora_B.weight": np.ones((8, 2), "f4")}
    save_file(lora, out / "adapter.safetensors")
    add("merge-lora", FULL, out / "adapter.safetensors", out / "merged", "--alpha", 4)
    add("names", "list")
    add("names", "show", "deepseek_v3")
    add("inspect", source)
    add("inspect", source, "--strategy", STRATEGIES[1])
    add("inspect", torn_tree(out / "torn"), "--strategy", STRATEGIES[1])
    add("inspect", file)
    add("inspect", FIXTURES / "ckpt_files" / "crc.safetensors")
    add("suggest", source)
    add("suggest", FIXTURES / "models" / "qwen3")
    add("verify", whole)
    add("verify", whole, "--src", source, *STRATEGIES)
    add("fingerprint", whole, "--strategy", DEMO / "dst_strategy.ckpt")
    add("get", source, "*layernorm.gamma", STRATEGIES[0], STRATEGIES[1], "--slice", "0:2")
    add("get", FULL, "*")
    add("get", OBJECTS, "*")
    add("inspect", OBJECTS)
    add("stats", source, "--strategy", STRATEGIES[1])
    add("diff", source, whole, "--a-strategy", STRATEGIES[1], "--b-strategy", STRATEGIES[3])
    renamed = ("--rename", "head.weight=head.w", "--b-strategy", STRATEGIES[3])
    add("diff", source, whole, "--a-strategy", STRATEGIES[1], *renamed)
    add("replicas", "--strategy", PIPELINE)
    add("replicas", "--group-info", *sorted(GROUP_INFO.iterdir()))
    add("group-info", "inspect", *sorted(GROUP_INFO.iterdir()))
    add("strategy", "show", PIPELINE)
    add("strategy", "show", FIXTURES / "12_manual_split4" / "strategy_json")
    add("strategy", "show", FIXTURES / "12_manual_split4" / "strategy_json", "embedding.embedding_table")
    add("strategy", "show", DEMO / "src_strategy.ckpt", "head.weight")
    add("strategy", "diff", DEMO / "src_strategy.ckpt", PIPELINE)
    add("strategy", "diff", DEMO / "src_strategy.ckpt", "none")
    add("strategy", "check", DEMO / "src_strategy.ckpt", source)
    add("strategy", "check", DEMO / "dst_strategy.ckpt", source, status=4)
    done(
        "convert",
        source,
        out / "dp2",
        STRATEGIES[0],
        STRATEGIES[1],
        "--dst-strategy",
        FIXTURES / "10_dp2mp4pp1" / "strategy",
    )
    add("strategy", "check", PIPELINE, out / "dp2", status=4)
    shutil.rmtree(out / "dp2" / "rank_3")
    add("recover", out / "dp2", out / "recovered", "--strategy", FIXTURES / "10_dp2mp4pp1" / "strategy", "--dry-run")
    add("recover", out / "dp2", out / "recovered", "--strategy", FIXTURES / "10_dp2mp4pp1" / "strategy")
    target = whole / "rank_2" / "checkpoint_2.ckpt"
    content = bytearray(target.read_bytes())
    content[-40] ^= 1
    target.write_bytes(content)
    add("verify", whole, status=4)
    add("status", whole)
    return printed


def torn_tree(place: Path) -> Path:
    """A tree whose newest step lacks a file, and in which a rank has two files of one step."""
    source = DEMO / "src_checkpoints"
    shutil.copytree(source, place)
    for directory in sorted(place.iterdir())[1:]:
        (file,) = directory.iterdir()
        shutil.copy(file, file.with_name(file.name.replace("2_10", "3_10")))
        shutil.copy(file, file.with_name(file.name.replace("2_10", "1_10")))
    shutil.copy(file, file.with_name("other-1_10.ckpt"))
    return place


def commands_with_json() -> Iterator[str]:
    for name, command, _ in walk():
        if any("--json" in parameter.opts for parameter in command.params):
            yield name


@pytest.mark.deep
@pytest.mark.parametrize("name", list(commands_with_json()))
def test_every_json_document_has_the_documented_keys(name: str, examples: dict[str, list[Any]]) -> None:
    allowed = documented()
    assert name in allowed, f"docs/json.md lists no keys of {name}"
    shown = []
    for document in examples[name]:
        listed = isinstance(document, list)
        for item in document if listed else [document]:
            assert (listed, sorted(item)) in allowed[name], name
            shown.append((listed, sorted(item)))
    assert all(kind in shown for kind in allowed[name]), f"no example of some document of {name}"
