"""Conversions into object stores: the objects equal the files that the same command writes to a disk."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.corpus import FIXTURES
from tests.object_store import Bucket, Objects
from tests.running import Argument, done, fails

pytestmark = pytest.mark.long

DEMO = FIXTURES / "demo"


class Kind(NamedTuple):
    """A conversion.

    Attributes:
        source: where it lies among the fixtures.
        options: what it becomes.
        strategy: of the source, where it needs one.
    """

    source: Path
    options: tuple[Argument, ...]
    strategy: Path | None = None


def demo(*options: Argument) -> Kind:
    return Kind(DEMO / "src_checkpoints", options, DEMO / "src_strategy.ckpt")


TO_DEMO: tuple[Argument, ...] = ("--dst-strategy", DEMO / "dst_strategy.ckpt")
SMALL: tuple[Argument, ...] = ("--max-shard-size", "2KB")
CHECKPOINT2 = FIXTURES / "checkpoint2/a02_dp2mp2_dedup/checkpoint"
UNIFIED = FIXTURES / "full_weights/u05_pp2_opt_ms270/unified"
KINDS = {
    "ranks": demo(*TO_DEMO),
    "ranks, other format": demo(*TO_DEMO, "--format", "safetensors", "--prefix", "step_"),
    "ranks, same cut": demo("--dst-strategy", "same"),
    "ranks, other types": demo(*TO_DEMO, "--cast", "*=bfloat16"),
    "some ranks": demo(*TO_DEMO, "--ranks", "0,2-3"),
    "a shard": demo(*TO_DEMO, "--shard", "1/2"),
    "one file": demo("--dst-strategy", "none", "--format", "safetensors"),
    "checkpoint2": demo("--to", "checkpoint2", "--dst-strategy", "same"),
    "unified": demo("--to", "unified", *SMALL),
    "huggingface": demo("--to", "huggingface", *SMALL),
    "checkpoint2 to ranks": Kind(CHECKPOINT2, ("--dst-strategy", "same")),
    "checkpoint2 to unified": Kind(CHECKPOINT2, ("--to", "unified", *SMALL)),
    "unified to huggingface": Kind(UNIFIED, ("--to", "huggingface", *SMALL)),
    "huggingface to one": Kind(FIXTURES / "full_weights/h01_bf16_sharded/model", ("--to", "huggingface")),
}


def written(objects: Bucket, key: str = "out") -> dict[str, bytes]:
    """Everything below a key, but for records, which name the source, and the manifest."""
    return {name: data for name, data in objects.content(key).items() if not _is_record(name)}


def tree(place: Path) -> dict[str, bytes]:
    """Likewise of a directory."""
    paths = {str(path.relative_to(place)): path for path in sorted(place.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if not _is_record(name)}


def _is_record(name: str) -> bool:
    return name.startswith((".reshard/", "reshard-manifest"))


def words(kind: Kind, dst: Argument, source: str | None = None) -> list[Argument]:
    strategy: list[Argument] = [] if kind.strategy is None else ["--src-strategy", kind.strategy]
    return [source or kind.source, dst, *strategy, *kind.options]


@pytest.mark.deep
@pytest.mark.short
@pytest.mark.parametrize("name", ["ranks, other format"])
def test_objects_equal_local_files(name: str, objects: Objects, tmp_path: Path) -> None:
    kind = KINDS[name]
    done("convert", *words(kind, tmp_path / "out"))
    done("convert", *words(kind, objects.path("out")), "--verify")
    assert written(objects) == tree(tmp_path / "out") != {}


@pytest.mark.parametrize("name", KINDS)
def test_objects_from_a_source_in_the_same_bucket_equal_local_files(
    name: str, objects: Objects, tmp_path: Path
) -> None:
    kind = KINDS[name]
    done("convert", *words(kind, tmp_path / "out"))
    source = objects.upload(kind.source, "runs/some run/ckpt")
    for key, src in (("out", None), ("copy", source)):
        done("convert", *words(kind, objects.path(key), src), "--verify")
        assert written(objects, key) == tree(tmp_path / "out") != {}
    before = objects.content()
    done("convert", *words(kind, objects.path("out")), "--verify")
    if "copy/reshard-manifest.json" in before:
        done("resume", objects.path("copy"))
    assert objects.content() == before


@pytest.mark.deep
@pytest.mark.short
@pytest.mark.parametrize("conditions", ["refuse", "ignore"])
def test_a_service_without_conditional_writes_is_refused_before_anything_is_written(
    conditions: str, objects: Objects
) -> None:
    objects.faults.conditions = conditions
    for kind in (demo(*TO_DEMO), demo("--to", "huggingface")):
        fails(3, "convert", *words(kind, objects.path("out")), texts=["If-None-Match"])
        assert not objects.content() and not objects.uploads()


@pytest.mark.parametrize(
    "key, status, texts",
    [
        ("s3://{bucket}-not/out", 3, "this object store has no bucket"),
        ("s3://", 2, "s3://: names no bucket"),
        ("s3:/{bucket}/out", 2, "with two slashes"),
        ("s3://{bucket}/a//out", 2, "/a//out: holds an empty name"),
        ("s3://{bucket}/a/../out", 2, "/a/../out: holds an empty name"),
    ],
)
@pytest.mark.parametrize("more", ["--verify", "--dry-run"])
def test_an_unusable_target_is_an_error_before_anything_is_written(
    key: str, status: int, texts: str, more: str, objects: Objects
) -> None:
    dst = key.format(bucket=objects.bucket)
    fails(status, "convert", *words(demo(*TO_DEMO), dst), more, texts=[texts])
    assert {method for method, _ in objects.faults.asked} <= {"GET", "HEAD"}
    assert not objects.content()
