"""Commands and functions with outputs in an object store equal those on a file system."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import reshard
from tests.dask_cluster import DaskCluster
from tests.lora.test_merge_lora import base, matrices, peft, weights
from tests.object_store import Objects
from tests.running import Argument, done, fails
from tests.small import World
from tests.storage.test_killed_store_runs import job
from tests.storage.test_object_stores import some_ranks_left
from tests.storage.test_writing_to_stores import DEMO, TO_DEMO, demo, tree, words, written

pytestmark = pytest.mark.long

NAME = "ein Name mit Löchern/名前/a+b%20c&d=é"


def cuts(world: World) -> list[Argument]:
    return ["--src-strategy", world.old, "--dst-strategy", world.new]


def test_reading_commands_print_the_same_for_a_store_and_a_disk(objects: Objects, saved: World) -> None:
    dst = objects.path(NAME)
    saved.convert("--checksum", "crc32")
    done("convert", saved.src, dst + "/", *cuts(saved), "--checksum", "crc32")
    for command, *more in (
        ("status", "--json"),
        ("verify", "--json"),
        ("verify", "--json", "--src", saved.src, *cuts(saved)),
        ("fingerprint", "--json", "--strategy", saved.new),
        ("inspect",),
    ):
        here, target = (done(command, place, *more).out for place in (saved.dst, dst))
        # A shell requires quotes around spaces, and JSON is ASCII.
        for form in (f"'{dst}'", json.dumps(dst)[1:-1], dst):
            target = target.replace(form, str(saved.dst))
        assert target == here
    objects.put(f"{NAME}/rank_1/checkpoint_1.ckpt", b"other")
    assert done("status", dst, "--json").json["changed"] == [1]
    assert "rank_1/checkpoint_1.ckpt has 5 bytes" in fails(4, "verify", dst).out
    fails(3, "resume", dst, texts=["already holds"])
    done("convert", saved.src, dst, *cuts(saved), "--checksum", "crc32", "--overwrite")
    assert written(objects, NAME) == tree(saved.dst)


@pytest.mark.deep
@pytest.mark.short
def test_dry_run_and_plan_write_nothing(objects: Objects, saved: World) -> None:
    dst = objects.path("out")
    done("convert", saved.src, dst, *cuts(saved), "--dry-run")
    done("plan", saved.src, dst, *cuts(saved))
    assert {method for method, _ in objects.faults.asked} <= {"GET", "HEAD"}


@pytest.mark.deep
@pytest.mark.short
def test_view_reads_from_and_writes_to_a_store(objects: Objects, saved: World) -> None:
    src, page = objects.path("ckpt"), objects.path("pages/ckpt.html")
    for rank, tensors in tree(saved.src).items():
        objects.put(f"ckpt/{rank}", tensors)
    for _ in range(2):
        done("view", src, "--src-strategy", saved.old, "--dst-strategy", saved.new, "-o", page)
    (content,) = objects.content("pages").values()
    assert b'"complete":true' in content and b'"base":"s3://' in content
    objects.put("pages/ckpt.html", b"mine")
    fails(2, "view", src, "-o", page, texts=["is no page of reshard view"])


@pytest.mark.deep
@pytest.mark.short
def test_tensors_and_strategies_are_written_to_a_store(objects: Objects, saved: World) -> None:
    place = saved.root / "w.npy"
    for target in (place, objects.path("npy/w.npy")):
        done("get", saved.src, "w", "--strategy", saved.old, "-o", target)
    assert objects.content("npy")["w.npy"] == place.read_bytes()
    stages = saved.root / "stages"
    stages.mkdir()
    (stages / "old.ckpt").write_bytes(saved.old.read_bytes())
    for target in (saved.root / "merged.ckpt", objects.path("cut/merged.ckpt")):
        done("merge-pipeline", stages, target)
    assert objects.content("cut")["merged.ckpt"] == (saved.root / "merged.ckpt").read_bytes()


def test_a_large_tensor_is_uploaded_in_parts(objects: Objects, tmp_path: Path) -> None:
    tensor = np.arange(3_000_000, dtype=np.float32).reshape(1000, 3000)
    source = base(tmp_path / "src", {"w": tensor})
    done("get", source, "w", "-o", objects.path("w.npy"))
    assert sum("partNumber=" in path for _, path in objects.faults.asked) == 3
    (tmp_path / "w.npy").write_bytes(objects.content()["w.npy"])
    assert np.array_equal(np.load(tmp_path / "w.npy"), tensor)
    assert list(objects.content()) == ["w.npy"]


def test_an_adapter_is_merged_into_a_store(objects: Objects, tmp_path: Path) -> None:
    src, adapter = base(tmp_path / "base", weights()), peft(tmp_path / "adapter", matrices(), lora_alpha=8)
    done("merge-lora", src, adapter, tmp_path / "out")
    done("merge-lora", objects.upload(src, "base"), objects.upload(adapter, "adapter"), objects.path("out"))
    assert written(objects) == tree(tmp_path / "out")


@pytest.mark.parametrize("dst", ["src", "src/", "src/rank_0", ""])
def test_sources_are_never_overwritten(dst: str, objects: Objects, saved: World) -> None:
    src = objects.upload(saved.src, "src")
    before = objects.content()
    fails(2, "convert", src, objects.path(dst), *cuts(saved), texts=["overlap"])
    fails(2, "convert", f"{src}/rank_{{rank}}/*.ckpt", objects.path("src/rank_0"), *cuts(saved))
    assert objects.content() == before


def test_a_bucket_root_may_be_the_target(objects: Objects, saved: World) -> None:
    done("convert", saved.src, objects.path() + "/", *cuts(saved))
    saved.convert()
    assert written(objects, "") == tree(saved.dst)
    assert done("status", objects.path(), "--json").json["complete"]


def test_objects_of_other_programs_are_refused(objects: Objects, saved: World) -> None:
    objects.put("one/rank_0/checkpoint_0.ckpt", b"foreign")
    objects.put("two/rank_9/checkpoint_9.ckpt", b"foreign")
    objects.put("three", b"foreign")
    objects.put("four/rank_0/checkpoint_0.ckpt/more", b"foreign")
    objects.put("five/model.safetensors.index.json", b'{"weight_map": {}}')
    before = objects.content()
    for key, texts in (
        ("one", "already holds"),
        ("two", "holds checkpoints that no record"),
        ("three", "is not a directory"),
        ("four", "is not a regular file"),
        ("five", "five"),
    ):
        fails(3, "convert", saved.src, objects.path(key), *cuts(saved), texts=[texts])
    fails(3, "convert", saved.src, objects.path("two"), *cuts(saved), "--overwrite")
    assert objects.content() == before
    saved.convert()
    done("convert", saved.src, objects.path("one"), *cuts(saved), "--overwrite")
    assert written(objects, "one") == tree(saved.dst)


@pytest.mark.deep
@pytest.mark.short
def test_a_store_without_write_permission_is_a_short_error(objects: Objects, saved: World) -> None:
    objects.faults.choose = lambda number, method, path: None if method in ("GET", "HEAD") else "refuse"
    # No retry cures it.
    result = fails(3, "convert", saved.src, objects.path("out"), *cuts(saved), texts=["AccessDenied", "docs/stores.md"])
    assert len(result.err.strip().splitlines()) <= 2, result.err
    objects.faults.choose = lambda *_: None
    assert not objects.content()


def test_max_memory_under_one_part_is_refused(objects: Objects, tmp_path: Path) -> None:
    expected = job("parts", tmp_path)
    fails(2, *expected.into(objects.path("out"), "--max-memory", "8M"), texts=["--max-memory"])
    assert not objects.content()


def test_ranks_written_one_by_one_complete_a_store(objects: Objects, saved: World) -> None:
    dst = objects.path("out")
    saved.convert()
    src = objects.upload(saved.src, "out-not")
    for rank in (1, 0):
        assert "reshard-manifest.json" not in objects.content("out/")
        # A name that only begins alike is another.
        done("by-rank", rank, src, dst, *cuts(saved))
    assert written(objects, "out/") == tree(saved.dst)
    assert done("status", dst, "--json").json["complete"]


def test_lost_ranks_are_recovered_into_a_store(objects: Objects, tmp_path: Path) -> None:
    remaining, cut = some_ranks_left(objects, tmp_path / "whole")
    done("recover", remaining, objects.path("out"), "--strategy", cut)
    assert written(objects) == tree(tmp_path / "whole")


def transformed(src: str, dst: str, old: str, new: str) -> None:
    reshard.transform_checkpoints(src, dst, "checkpoint_", old, new)


def one_by_one(src: str, dst: str, old: str, new: str) -> None:
    for rank in (0, 1):
        files = {
            needed: f"{src}/rank_{needed}/net-1_10.ckpt" for needed in reshard.rank_list_for_transform(rank, old, new)
        }
        reshard.transform_checkpoint_by_rank(rank, files, f"{dst}/rank_{rank}/checkpoint_{rank}.ckpt", old, new)


def unified(src: str, dst: str, old: str, new: str) -> None:
    reshard.unified_safetensors(src, old, dst)


def distributed(src: str, dst: str, old: str, new: str) -> None:
    reshard.unified_safetensors(src, old, f"{dst}/unified")
    for rank in (0, 1):
        reshard.load_distributed_checkpoint(
            None,
            predict_strategy=new,
            format="safetensors",
            unified_safetensors_dir=f"{dst}/unified",
            dst_safetensors_dir=f"{dst}/out",
            rank_id=rank,
        )


@pytest.mark.parametrize("call", [transformed, one_by_one, unified, distributed])
def test_the_python_functions_write_to_a_store(
    call: Callable[[str, str, str, str], None], objects: Objects, saved: World
) -> None:
    cut = [objects.upload(path, path.name) for path in (saved.old, saved.new)]
    call(str(saved.src), str(saved.dst), str(saved.old), str(saved.new))
    call(objects.upload(saved.src, "src"), objects.path("out"), *cut)
    files, expected = written(objects), tree(saved.dst)
    assert {name for name in files if ".reshard/" not in name} == {name for name in expected if ".reshard/" not in name}
    for name, content in expected.items():
        assert files.get(name) == content or "reshard" in name, name


def test_workers_of_a_cluster_write_to_a_store(objects: Objects, tmp_path: Path) -> None:
    expected = job("parts", tmp_path)
    source = objects.upload(tmp_path / "src", "src")
    with DaskCluster(tmp_path / "cluster", everywhere=_aws()) as cluster:
        cluster.workers(2)
        for name, src in (("out", str(tmp_path / "src")), ("again", source)):
            words = [src if word == tmp_path / "src" else word for word in expected.into(objects.path(name))]
            result = cluster.run(*words)
            assert result.status == 0, result.err
            assert written(objects, name) == expected.whole


def _aws() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def test_a_target_in_a_store_is_converted_back(objects: Objects, tmp_path: Path) -> None:
    kind = demo(*TO_DEMO)
    done("convert", *words(kind, objects.path("out")))
    cut: list[Argument] = ["--src-strategy", DEMO / "dst_strategy.ckpt", "--dst-strategy", DEMO / "src_strategy.ckpt"]
    done("convert", objects.path("out"), objects.path("back"), *cut, "--verify")
    done("convert", *words(kind, tmp_path / "out"))
    done("convert", tmp_path / "out", tmp_path / "back", *cut)
    assert written(objects, "back") == tree(tmp_path / "back")
    assert json.loads(objects.content("back")["reshard-manifest.json"])
