"""Sources in object stores: the same output as from local files, whatever the network does."""

from __future__ import annotations

import io
import itertools
import os
import random
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from reshard.source_replicas.compare import ReplicaFiles
from reshard.storage.files import read_small
from tests.checkpoint_writing import write_safetensors
from tests.corpus import FIXTURES, ROOT
from tests.object_store import KEY, SECRET, Objects
from tests.running import LAUNCHER, Argument, done, fails
from tests.sampling import some_of
from tests.storage.test_writing_to_stores import tree
from tests.trees import Value, cut_ranks, layout, single, write_strategy, write_tree

DEMO = FIXTURES / "demo"


class Kind(NamedTuple):
    """A source of some form.

    Attributes:
        source: where it lies among the fixtures.
        strategy: of the source, where it needs one.
        options: what it becomes.
    """

    source: Path
    strategy: bool
    options: tuple[Argument, ...]


TO_DEMO: tuple[Argument, ...] = ("--dst-strategy", DEMO / "dst_strategy.ckpt")
KINDS = {
    "ranks to ranks": Kind(DEMO / "src_checkpoints", True, TO_DEMO),
    "ranks to checkpoint2": Kind(DEMO / "src_checkpoints", True, ("--to", "checkpoint2", "--dst-strategy", "same")),
    "ranks to one file": Kind(DEMO / "src_checkpoints", True, ("--dst-strategy", "none", "--format", "safetensors")),
    "checkpoint2 to unified": Kind(
        FIXTURES / "checkpoint2/a02_dp2mp2_dedup/checkpoint", False, ("--to", "unified", "--max-shard-size", "2KB")
    ),
    "unified to huggingface": Kind(
        FIXTURES / "full_weights/u05_pp2_opt_ms270/unified", False, ("--to", "huggingface", "--max-shard-size", "2KB")
    ),
    "huggingface to huggingface": Kind(
        FIXTURES / "full_weights/h01_bf16_sharded/model", False, ("--to", "huggingface", "--max-shard-size", "2KB")
    ),
    "dcp to hyper-parallel": Kind(
        FIXTURES / "dcp/w2_old_metadata/checkpoint", False, ("--to", "hyper-parallel", "--shards", "3")
    ),
    "strides of dcp to dcp": Kind(FIXTURES / "dcp/w1_strides/checkpoint", False, ("--to", "dcp", "--shards", "2")),
    "hyper-parallel to dcp": Kind(
        FIXTURES / "dcp/hyper_w4_2026_03_by_rank/checkpoint", False, ("--to", "dcp", "--shards", "3")
    ),
    "verl to dcp": Kind(FIXTURES / "verl/w4_mesh/checkpoint", False, ("--to", "dcp", "--shards", "3")),
    "torch_dist to huggingface": Kind(
        FIXTURES / "megatron/td_moe_fully/checkpoint", False, ("--to", "huggingface", "--names", "qwen3_moe")
    ),
    "a legacy tree to shards": Kind(
        FIXTURES / "megatron/legacy_dense/checkpoint", False, ("--to", "hf-sharded", "--shards", "2")
    ),
    "a model with its configuration": Kind(
        FIXTURES / "models/qwen3", False, ("--to", "huggingface", "--cast", "Float32")
    ),
}


def locally(kind: Kind, place: Path) -> dict[str, bytes]:
    strategy: list[Argument] = ["--src-strategy", DEMO / "src_strategy.ckpt"] if kind.strategy else []
    done("convert", kind.source, place, *strategy, *kind.options)
    return tree(place)


def from_store(kind: Kind, objects: Objects, place: Path, *more: Argument) -> dict[str, bytes]:
    source = objects.upload(kind.source, "runs/some run/ckpt")
    strategy: list[Argument] = []
    if kind.strategy:
        strategy = ["--src-strategy", objects.upload(DEMO / "src_strategy.ckpt", "strategies/src.ckpt")]
    done("convert", source, place, *strategy, *kind.options, *more)
    return tree(place)


def demo_command(objects: Objects, out: Path) -> list[Argument]:
    """What converts the demo's source, put into a store."""
    source = objects.upload(DEMO / "src_checkpoints", "ckpt")
    return ["convert", source, out, "--src-strategy", DEMO / "src_strategy.ckpt", *TO_DEMO]


def some_ranks_left(objects: Objects, place: Path) -> tuple[str, Path]:
    """Some ranks of a checkpoint in a store; their path and the strategy. All of them are in ``place``."""
    cut = FIXTURES / "10_dp2mp4pp1/strategy"
    source: list[Argument] = ["--src-strategy", DEMO / "src_strategy.ckpt"]
    done("convert", DEMO / "src_checkpoints", place, *source, "--dst-strategy", cut)
    for rank in (0, 2, 3, 5):
        objects.upload(place / f"rank_{rank}", f"left/rank_{rank}")
    return objects.path("left"), cut


@pytest.mark.parametrize("name", some_of(KINDS, 2))
def test_a_source_in_a_store_converts_like_a_local_one(name: str, objects: Objects, tmp_path: Path) -> None:
    outcome = from_store(KINDS[name], objects, tmp_path / "out", "--verify")
    assert outcome and outcome == locally(KINDS[name], tmp_path / "local")


def some_fail(number: int, method: str, path: str) -> str | None:
    return ("drop", None, "unavailable", None, None, "cut", None)[number % 7]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["ranks to ranks", "checkpoint2 to unified"])
def test_network_failures_do_not_change_the_output(name: str, objects: Objects, tmp_path: Path) -> None:
    objects.faults.choose = some_fail
    outcome = from_store(KINDS[name], objects, tmp_path / "out", "--verify")
    objects.faults.choose = lambda *_: None
    assert outcome == locally(KINDS[name], tmp_path / "local")


@pytest.mark.deep
def test_headers_are_requested_concurrently(objects: Objects, tmp_path: Path) -> None:
    # The first header tells what the others are to be; those are held back here until all have been asked for.
    others = threading.Barrier(7)
    headers = itertools.count()

    def hold(number: int, method: str, path: str) -> None:
        if method == "GET" and path.endswith(".ckpt") and "/rank_" in path and 1 <= next(headers) <= 7:
            others.wait(timeout=60)

    objects.faults.delay = 0.02
    objects.faults.choose = hold
    from_store(KINDS["ranks to ranks"], objects, tmp_path / "out")
    assert next(headers) >= 8 and not others.broken


@pytest.mark.deep
def test_each_header_takes_one_request(objects: Objects, tmp_path: Path) -> None:
    source = objects.upload(DEMO / "src_checkpoints", "ckpt")
    words: list[Argument] = ["plan", source, tmp_path / "out", "--src-strategy", DEMO / "src_strategy.ckpt", *TO_DEMO]
    done(*words)
    read = Counter(path for method, path in objects.faults.asked if method == "GET" and path.endswith(".ckpt"))
    assert len(read) == 8 and set(read.values()) == {1}


def lists(objects: Objects) -> Counter[str]:
    """How often each directory was listed, by its prefix, without checks for any key."""
    counts: Counter[str] = Counter()
    for _, path in objects.faults.asked:
        query = parse_qs(urlsplit(path).query)
        if "list-type" in query and "max-keys" not in query:
            counts[query.get("prefix", [""])[0]] += 1
    return counts


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "command"), some_of([(name, command) for name in KINDS for command in ("convert", "inspect", "stats")], 4)
)
def test_a_directory_is_listed_at_most_twice(name: str, command: str, objects: Objects, tmp_path: Path) -> None:
    kind = KINDS[name]
    source = objects.upload(kind.source, "ckpt")
    strategy: list[Argument] = ["--src-strategy", DEMO / "src_strategy.ckpt"] if kind.strategy else []
    if command == "convert":
        done(command, source, tmp_path / "out", *strategy, *kind.options)
    else:
        done(command, source, *(strategy if command == "stats" else []))
    listing = lists(objects)
    assert listing.pop("ckpt/") <= (3 if command == "inspect" else 2)
    # Directories of ranks, and of the iteration: Megatron's is recognised by its names, and `inspect` lists all steps.
    again = 0 if kind.source.parent.parent.name != "megatron" else 2 if command == "inspect" else 1
    assert {path: count for path, count in listing.items() if count > 1 + ("/iter_" in path) * again} == {}
    # A file's status is asked for at most once, but for the one that holds Megatron's arguments, which come first.
    asked = Counter(path for method, path in objects.faults.asked if method == "HEAD")
    most = {
        path: 2 if again and path.endswith(("/common.pt", "/mp_rank_00_000/model_optim_rng.pt")) else 1
        for path in asked
    }
    others = {path: count for path, count in asked.items() if count > most[path]}
    assert not {path for path in others if not path.endswith(("/ckpt", "/ckpt/.reshard"))}, others


@pytest.mark.deep
@pytest.mark.parametrize("cut, at_a_time", [([0, -1], 4), ([-1, -1], 3)])
def test_samples_of_replicas_are_requested_concurrently(
    cut: list[int], at_a_time: int, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slices that should differ, of four ranks, or replicas, of which the first tells where the others are read.
    strategy = single({"w": layout([4], cut)})
    full = {"w": Value("Float32", np.random.default_rng(1).integers(1, 1 << 30, (64, 1024)).astype("<u4"))}
    write_tree(tmp_path / "src", cut_ranks(strategy, full), "rank_{rank}/net.ckpt")
    old = write_strategy(tmp_path / "old", strategy)
    together = threading.Barrier(at_a_time)
    read = ReplicaFiles.read
    alone = itertools.count()

    def held(self: ReplicaFiles, *arguments: Any) -> None:
        read(self, *arguments)
        if next(alone) >= 4 - at_a_time:
            together.wait(timeout=60)

    monkeypatch.setattr(ReplicaFiles, "read", held)
    done("convert", objects.upload(tmp_path / "src", "ckpt"), tmp_path / "out", "--src-strategy", old,
         "--dst-strategy", "none")  # fmt: skip
    assert next(alone) == 4 and not together.broken


@pytest.mark.deep
def test_plan_describes_requests_to_a_store(objects: Objects, tmp_path: Path) -> None:
    objects.faults.delay = 0.05
    source = objects.upload(DEMO / "src_checkpoints", "ckpt")
    words: list[Argument] = ["plan", source, tmp_path / "out", "--src-strategy", DEMO / "src_strategy.ckpt", *TO_DEMO]
    requests = done(*words, "--json", "--jobs", 2).json["requests"]
    assert 0.05 <= requests["round_trip"] < 0.5 and requests["at_a_time"] == 64
    assert "requests 64 at a time" in done(*words, "--jobs", 2).out
    objects.faults.delay = 0.0
    words[1] = DEMO / "src_checkpoints"
    assert done(*words, "--json").json["requests"] is None


@pytest.mark.deep
def test_reading_commands_accept_paths_in_a_store(objects: Objects, tmp_path: Path) -> None:
    source = objects.upload(DEMO / "src_checkpoints", "ckpt")
    strategy = objects.upload(DEMO / "src_strategy.ckpt", "strategy.ckpt")
    target = objects.upload(DEMO / "dst_strategy.ckpt", "target.ckpt")
    here: tuple[Path, Path] = (DEMO / "src_checkpoints", DEMO / "src_strategy.ckpt")
    one, two = (
        done("fingerprint", place, "--strategy", cut, "--json").json["parameters"]
        for place, cut in ((source, strategy), here)
    )
    assert one == two
    assert done("strategy", "diff", strategy, target).out.replace(objects.path() + "/", "")
    words: list[Argument] = ["rank-list", 1, "--src-strategy", strategy, "--dst-strategy", target]
    assert done(*words).out == done("rank-list", 1, "--src-strategy", here[1], *TO_DEMO).out
    assert "8 ranks" in done("inspect", source, "--strategy", strategy).out
    done("strategy", "check", strategy, source)
    pattern = f"{source}/rank_{{rank}}/*.ckpt"
    done("convert", pattern, tmp_path / "out", "--src-strategy", strategy, "--dst-strategy", target)
    done("verify", tmp_path / "out", "--src", source, "--src-strategy", strategy, "--dst-strategy", target)


@pytest.mark.deep
def test_lost_ranks_are_recovered_from_a_store(objects: Objects, tmp_path: Path) -> None:
    remaining, cut = some_ranks_left(objects, tmp_path / "whole")
    done("recover", remaining, tmp_path / "out", "--strategy", cut)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.deep
def test_resume_continues_with_a_source_in_a_store(objects: Objects, tmp_path: Path) -> None:
    words = demo_command(objects, tmp_path / "out")
    done(*words)
    (tmp_path / "out/rank_1/checkpoint_1.ckpt").unlink()
    (tmp_path / "out/reshard-manifest.json").unlink()
    done("resume", tmp_path / "out")
    assert tree(tmp_path / "out") == locally(KINDS["ranks to ranks"], tmp_path / "local")


@pytest.mark.deep
def test_output_and_records_contain_no_secret(objects: Objects, tmp_path: Path) -> None:
    words = demo_command(objects, tmp_path / "out")
    message = [done(*words, "-v").err, fails(3, "inspect", objects.path("nothing"), "--debug").err]
    written = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    for secret in (SECRET, KEY):
        assert not any(secret in text for text in message)
        assert not any(secret.encode() in data for data in written)


def test_without_credentials_the_error_lists_their_places(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    path = objects.upload(DEMO / "src_checkpoints", "ckpt")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    # A service of another name is requested separately.
    url = objects.url.replace("127.0.0.1", "localhost")
    fails(3, "inspect", path, "--endpoint-url", url, texts=["credentials are missing", "AWS_PROFILE"])


def test_endpoint_url_selects_the_service(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    path = objects.upload(DEMO / "src_checkpoints", "ckpt")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert "8 ranks" in done("inspect", path, "--endpoint-url", objects.url).out
    fails(2, "inspect", path, "--endpoint-url", "localhost:9000", texts=["--endpoint-url: is no URL"])


@pytest.mark.deep
@pytest.mark.parametrize("key", ["nothing", "ckpt/rank_0/mlp-2_10.ckp"])
def test_a_missing_object_does_not_exist(key: str, objects: Objects) -> None:
    objects.upload(DEMO / "src_checkpoints", "ckpt")
    fails(3, "inspect", objects.path(key), texts=["does not exist"])
    bucket = f"{objects.bucket}-not"
    fails(3, "inspect", f"s3://{bucket}/ckpt", texts=[f"this object store has no bucket '{bucket}'", "--endpoint-url"])
    fails(2, "inspect", "s3://", texts=["names no bucket"])
    fails(2, "inspect", "s3://b/x", texts=["'b' is no name of a bucket", "two letters"])


def test_a_request_is_repeated_when_the_content_of_its_error_is_cut_off(objects: Objects) -> None:
    # An empty object has no range.
    empty = objects.put("empty", b"")
    objects.faults.choose = lambda *_: "cut" if sum(objects.faults.requests.values()) < 4 else None
    assert read_small(empty, 1) == b""
    objects.faults.requests.clear()
    with pytest.raises(FileNotFoundError):
        read_small(objects.path("absent"), 1)


def test_without_boto3_the_error_names_the_extra_to_install(tmp_path: Path) -> None:
    """As where the packages are not installed; in a process that has not loaded them."""
    script = f"import sys; sys.modules['boto3'] = None; {LAUNCHER}"
    command = [sys.executable, "-c", script, "inspect", "s3://bucket/ckpt"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), timeout=60)
    assert result.returncode == 3
    assert "pip install boto3" in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_any_faults_in_any_order_do_not_change_the_output(seed: int, objects: Objects, tmp_path: Path) -> None:
    chance = random.Random(seed)
    kind = KINDS[chance.choice(list(KINDS))]
    kinds: list[str | None] = ["drop", "cut", "unavailable", "lost", *[None] * 12]
    objects.faults.choose = lambda *_: chance.choice(kinds)
    outcome = from_store(kind, objects, tmp_path / "out", "--verify", "--jobs", chance.choice([1, 2, 4]))
    assert outcome == locally(kind, tmp_path / "local")


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.6, 0.9, 1.2, 1.5, 1.8, 2.1, 2.4])
def test_the_same_command_resumes_after_a_kill(seconds: float, objects: Objects, tmp_path: Path) -> None:
    words = demo_command(objects, tmp_path / "out")
    objects.faults.delay = 0.1
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, *map(str, words)], stderr=subprocess.DEVNULL) as process:
        time.sleep(seconds)
        process.kill()
    objects.faults.delay = 0.0
    done(*words)
    assert tree(tmp_path / "out") == locally(KINDS["ranks to ranks"], tmp_path / "local")
    assert not list((tmp_path / "out").rglob(".reshard-tmp-*"))


@pytest.mark.deep
def test_archives_in_a_store_have_no_crcs(objects: Objects, tmp_path: Path) -> None:
    """Sent parts cannot be changed; the manifest has the checksums of what is stored."""
    write_safetensors(tmp_path / "model.safetensors", {"a.w": np.arange(12, dtype="f4").reshape(4, 3)})
    cut: list[Argument] = ["--src-strategy", "none", "--to", "dcp", "--shards", 2, "--checksum", "crc32"]
    done("convert", tmp_path / "model.safetensors", objects.path("out"), *cut, "--verify")
    assert "no differences" in done("verify", objects.path("out")).err
    data = objects.client.get_object(Bucket=objects.bucket, Key="out/__0_0.distcp")["Body"].read()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.getinfo("archive/data/0").CRC == 0
    whole: list[Argument] = ["--to", "hf-sharded", "--shards", 1]
    done("convert", objects.path("out"), tmp_path / "back", *whole, "--verify")
