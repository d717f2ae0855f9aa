"""--scheduler: the result equals a local run's, also after lost workers, schedulers and clients."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.synthetic import Model, Scheme, write_checkpoint, write_strategy
from tests.dask_cluster import DaskCluster, ended, until
from tests.running import Argument, done, fails, flat, warns
from tests.small import World, tensors
from tests.trees import layout, single, version
from tests.trees import write_strategy as write_one_strategy

MODEL = Model(layers=4, matrices=2, rows=48, columns=32)
OLD, NEW = Scheme(data=2, model=4, sharded=True), Scheme(stages=2, data=2, model=6)
MANIFEST = "reshard-manifest.json"


class Large:
    """A conversion to 24 ranks, and its files without a cluster."""

    def __init__(self, root: Path) -> None:
        self.root, self.src, self.whole = root, root / "src", root / "whole"
        write_checkpoint(self.src, MODEL, OLD)
        write_strategy(root / "old", MODEL, OLD)
        write_strategy(root / "new", MODEL, NEW)
        done(*self.words(self.whole))

    def words(self, dst: Path, *options: Argument) -> list[Argument]:
        strategies: list[Argument] = ["--src-strategy", self.root / "old", "--dst-strategy", self.root / "new"]
        return ["transform-dir", self.src, dst, *strategies, "--checksum", "crc32", *options]

    def same(self, dst: Path) -> None:
        """The files, manifest included, are exactly those of a local run."""
        assert files(dst) == files(self.whole)


def files(root: Path) -> dict[str, bytes]:
    """Everything in a target directory but its records; temporary files too, wherever they are."""
    paths = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in paths.items()
        if not name.startswith(".reshard/") or path.name.startswith(".reshard-tmp")
    }


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Large:
    return Large(tmp_path_factory.mktemp("large"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DaskCluster]:
    with DaskCluster(tmp_path / "cluster") as started:
        yield started


def test_another_worker_takes_over_from_a_killed_one(cluster: DaskCluster, large: Large, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    first, *_ = cluster.workers(3, slow=0.02)
    client = cluster.start(*large.words(dst, "--json"))
    until(lambda: list(dst.glob("rank_*/.reshard-tmp-*")))
    first.kill()
    cluster.worker()
    result = ended(client)
    assert result.status == 0, result.err
    large.same(dst)
    assert result.json["ranks"] == list(range(24))
    assert result.json["manifest"] == str(dst / MANIFEST)
    assert result.json["bytes_written"] == sum(path.stat().st_size for path in dst.glob("rank_*/*"))
    again = cluster.run(*large.words(dst))
    warns(again, "nothing to write")
    assert again.status == 0


@pytest.mark.long
def test_workers_replace_all_ranks_of_another_conversion(cluster: DaskCluster, large: Large, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    done(*large.words(dst, "--prefix", "old"))
    first, *_ = cluster.workers(2, slow=0.02)
    client = cluster.start(*large.words(dst, "--overwrite"))
    until(lambda: list(dst.glob("rank_*/checkpoint_*")))
    first.kill()
    cluster.worker()
    assert ended(client).status == 0
    large.same(dst)
    assert not list(dst.glob("rank_*/old*"))


@pytest.mark.long
def test_an_interrupted_run_reports_progress_and_resumes(cluster: DaskCluster, large: Large, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    cluster.workers(2, slow=0.05)
    client = cluster.start(*large.words(dst))
    until(lambda: list(dst.glob("rank_*/checkpoint_*")))
    client.send_signal(signal.SIGINT)
    result = ended(client)
    assert result.status == 130
    warns(result, "of 24 ranks written; run the same command again to continue")
    before = {path: version(path) for path in dst.glob("rank_*/checkpoint_*")}
    assert 0 < len(before) < 24
    assert cluster.run(*large.words(dst)).status == 0
    large.same(dst)
    assert before == {path: version(path) for path in before}


@pytest.mark.long
def test_unusable_workers_are_an_error_before_writing(cluster: DaskCluster, large: Large, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    cluster.workers(1, version="0.0.1")
    result = cluster.run(*large.words(dst))
    assert result.status == 3
    warns(result, "has reshard 0.0.1")
    assert not dst.exists()


@pytest.mark.long
def test_options_give_the_same_result_with_a_scheduler(cluster: DaskCluster, large: Large, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    cluster.workers(2)
    dry = cluster.run(*large.words(dst, "--dry-run"))
    assert dry.status == 0 and "24 files" in dry.out, dry
    planned = cluster.run("plan", *large.words(dst, "--json")[1:])
    assert planned.json["ranks"] == list(range(24))
    assert not dst.exists()
    assert cluster.run(*large.words(dst, "--ranks", "3-5,20")).status == 0
    assert sorted(path.parent.name for path in dst.glob("rank_*/*")) == ["rank_20", "rank_3", "rank_4", "rank_5"]
    assert cluster.run(*large.words(dst, "--jobs", 2, "--verify")).status == 0
    large.same(dst)
    damaged = dst / "rank_11" / "checkpoint_11.ckpt"
    damaged.write_bytes(b"something else")
    warns(cluster.run(*large.words(dst)), f"{damaged.relative_to(dst)}, modified after it was written")
    replaced = cluster.run(*large.words(dst, "--overwrite", "--ranks", "11"))
    assert replaced.status == 0
    versions = {path: version(path) for path in dst.glob("rank_*/*")}
    assert cluster.run(*large.words(dst, "--overwrite")).status == 0
    large.same(dst)
    assert all(version(path) != inode for path, inode in versions.items())


@pytest.mark.long
def test_a_wrong_source_strategy_is_an_error_before_workers_start(cluster: DaskCluster, plain: World) -> None:
    plain.save(tensors())
    swapped = {name: layout([2, 2], [1, -1] if name == "w" else [-1]) for name in ("w", "v")}
    plain.old = write_one_strategy(plain.root / "swapped", single(swapped))
    cluster.workers(1)
    result = cluster.run(*plain.words())
    assert result.status == 3 and not list(plain.dst.glob("rank_*/*"))
    warns(result, "does not fit this checkpoint, or replicas have diverged", "'w' differs between rank 0 and rank 1")


@pytest.mark.long
def test_workers_cast_as_a_local_run_does(cluster: DaskCluster, large: Large, tmp_path: Path) -> None:
    cluster.workers(2)
    words: list[Argument] = ["--format", "safetensors", "--cast", "Float16"]
    assert cluster.run(*large.words(tmp_path / "dst", *words)).status == 0
    done(*large.words(tmp_path / "here", *words))
    assert files(tmp_path / "dst") == files(tmp_path / "here")


def test_shard_and_scheduler_exclude_each_other(world: World) -> None:
    world.save(tensors())
    fails(2, *world.words("--scheduler", "tcp://127.0.0.1:1", "--shard", "0/2"), texts=["--shard", "--scheduler"])


@pytest.mark.parametrize("content", ["", "[]"])
def test_a_file_that_is_not_a_scheduler_file_is_an_error(world: World, content: str) -> None:
    world.save(tensors())
    file = world.root / "scheduler.json"
    file.write_text(content)
    fails(3, *world.words("--scheduler", file), texts=[file])


def test_without_dask_the_error_names_the_extra_to_install(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(tensors())
    for name in [name for name in sys.modules if name.startswith("reshard.cluster")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "distributed", None)
    fails(2, *world.words("--scheduler", "tcp://127.0.0.1:1"), texts=["pip install distributed"])


def test_by_rank_has_no_scheduler(world: World) -> None:
    world.save(tensors())
    fails(2, *world.words(0, "--scheduler", "tcp://127.0.0.1:1", command="by-rank"), texts=["--scheduler"])


@pytest.mark.parametrize("command", ["transform-dir", "plan"])
def test_help_states_that_schedulers_are_trusted(command: str) -> None:
    assert "use only clusters that you trust: dask exchanges pickles" in flat(done(command, "--help").out)
