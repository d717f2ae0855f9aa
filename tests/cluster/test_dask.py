"""--scheduler: the result equals a local run's, also after lost workers, schedulers and clients."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic import Model, Scheme, write_checkpoint, write_strategy
from reshard.checkpoints import FileHandles, read_index
from reshard.checkpoints.formats.archives import Archive
from reshard.plan.groups import bundles
from tests.certificates import make_certificate
from tests.corpus_dcp import fixtures
from tests.dask_cluster import DaskCluster, ended, until
from tests.encryption import KEY, encrypt_tree
from tests.running import Argument, done, fails, flat, reshard, warns
from tests.small import PLAIN, World, tensors
from tests.trees import layout, single, tree_bytes
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


def writing(dst: Path, process: subprocess.Popen[bytes]) -> bool:
    """Whether a process is in the middle of a target."""
    return any(dst.glob(f"rank_*/.reshard-tmp-*-{process.pid}-*"))


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=6), max_size=20), st.integers(1, 12))
def test_bundles_contain_whole_groups_and_are_balanced(groups: list[list[int]], count: int) -> None:
    sizes = dict(enumerate(size for group in groups for size in group))
    ranks = iter(sizes)
    numbered = [tuple(next(ranks) for _ in group) for group in groups]
    created = list(bundles(numbered, sizes, count))
    assert [rank for bundle in created for rank in bundle] == list(sizes)
    assert all(len({bundle for bundle in created if set(bundle) & set(group)}) == 1 for group in numbered)
    largest = max((sum(group) for group in groups), default=0)
    assert all(sum(sizes[rank] for rank in bundle) <= max(largest, sum(sizes.values()) / count) for bundle in created)
    assert len(created) <= 2 * count


def test_another_worker_takes_over_from_a_killed_one(cluster: DaskCluster, large: Large, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    first, *_ = cluster.workers(3, slow=0.02)
    client = cluster.start(*large.words(dst, "--json"))
    until(lambda: writing(dst, first))
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
@pytest.mark.parametrize("seed", range(6))
def test_a_run_completes_with_workers_killed_at_random_moments(
    cluster: DaskCluster, large: Large, tmp_path: Path, seed: int
) -> None:
    dst = tmp_path / "dst"
    chance = random.Random(seed)
    workers = cluster.workers(3, slow=0.02)
    client = cluster.start(*large.words(dst, *(["--overwrite"] if seed % 2 else [])))
    for victim in workers[:2]:
        moment = chance.uniform(0, 3)
        until(lambda: dst.exists() or client.poll() is not None)
        with pytest.raises(subprocess.TimeoutExpired):
            victim.wait(moment)
        victim.kill()
        cluster.worker(slow=0.02)
    assert ended(client).status == 0
    large.same(dst)


@pytest.mark.long
def test_workers_replace_all_ranks_of_another_conversion(cluster: DaskCluster, large: Large, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    done(*large.words(dst, "--prefix", "old"))
    first, *_ = cluster.workers(2, slow=0.02)
    client = cluster.start(*large.words(dst, "--overwrite"))
    until(lambda: list(dst.glob("rank_*/checkpoint_*")))
    assert len(list(dst.glob("rank_*/old*"))) == 24
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
    warns(result, "of 24 ranks written; run the same command again to continue", "interrupted")
    # Work that was under way has ended, and left nothing half-written.
    assert not list(dst.rglob(".reshard-tmp-*"))
    before = {path: path.stat().st_ino for path in dst.glob("rank_*/checkpoint_*")}
    assert 0 < len(before) < 24
    assert cluster.run(*large.words(dst)).status == 0
    large.same(dst)
    assert before == {path: path.stat().st_ino for path in before}


@pytest.mark.long
def test_a_lost_scheduler_is_a_retryable_error(cluster: DaskCluster, large: Large, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    cluster.workers(2, slow=0.05)
    client = cluster.start(*large.words(dst))
    until(lambda: list(dst.glob("rank_*/checkpoint_*")))
    cluster.scheduler.kill()
    result = ended(client)
    assert result.status == 1
    warns(result, "scheduler", "is gone", "run the same command again to continue", f"reshard resume {dst}")
    unreachable = cluster.run(*large.words(dst))
    assert unreachable.status == 1
    warns(unreachable, "cannot be reached")
    done(*large.words(dst))
    large.same(dst)


@pytest.mark.long
def test_ranks_that_kill_every_worker_are_named_and_the_others_written(large: Large, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    with DaskCluster(tmp_path / "cluster", distributed__scheduler__allowed_failures=0) as cluster:
        cluster.workers(1, fatal=7)
        client = cluster.start(*large.words(dst))
        until(lambda: "Remove worker" in (tmp_path / "cluster" / "log0").read_text())
        cluster.worker()
        result = ended(client)
    assert result.status == 1
    # Dask also blames the rank that was next on the worker.
    warns(result, "died", "not written: rank", "7", "of 24 ranks written; run the same command again to continue")
    assert 22 <= len(list(dst.glob("rank_*/checkpoint_*"))) <= 23
    done(*large.words(dst))
    large.same(dst)


@pytest.mark.long
def test_a_task_that_fails_once_is_retried(cluster: DaskCluster, large: Large, tmp_path: Path) -> None:
    cluster.workers(2, broken=1)
    result = cluster.run(*large.words(tmp_path / "dst"))
    assert result.status == 0, result.err
    large.same(tmp_path / "dst")


@pytest.mark.long
def test_a_task_that_fails_repeatedly_is_an_error(cluster: DaskCluster, large: Large, tmp_path: Path) -> None:
    cluster.workers(1, broken=1000)
    result = cluster.run(*large.words(tmp_path / "dst"))
    assert result.status == 1
    warns(result, "rank_0", "Input/output error", "Dask worker tcp://")
    assert not list((tmp_path / "dst").glob("rank_*/*"))


@pytest.mark.long
def test_unusable_workers_are_an_error_before_writing(cluster: DaskCluster, large: Large, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    (worker,) = cluster.workers(1, hidden=str(large.src / "rank_0" / "net-1_10.ckpt"))
    for options in ([], ["--dry-run"]):
        result = cluster.run(*large.words(dst, *options))
        assert result.status == 3
        warns(result, "does not see", large.src, "need the same paths on all workers and on this machine")
    worker.kill()
    until(lambda: "Remove worker" in (cluster.file.parent / "log0").read_text())
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
    assert replaced.status == reshard(*large.words(large.whole, "--overwrite", "--ranks", "11")).status
    inodes = {path: path.stat().st_ino for path in dst.glob("rank_*/*")}
    assert cluster.run(*large.words(dst, "--overwrite")).status == 0
    large.same(dst)
    assert all(path.stat().st_ino != inode for path, inode in inodes.items())


@pytest.mark.long
def test_a_source_modified_during_the_run_is_an_error(cluster: DaskCluster, large: Large, tmp_path: Path) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    shutil.copytree(large.src, src)
    cluster.workers(1, slow=0.02)
    words = large.words(dst)
    client = cluster.start(words[0], src, *words[2:])
    until(lambda: list(dst.glob("rank_*/checkpoint_*")))
    for path in src.glob("rank_*/*"):
        status = path.stat()
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 5 * 10**9))
    result = ended(client)
    assert result.status == 1, result
    warns(result, src, "have changed since the conversion was begun", "not written: rank")
    assert 0 < len(list(dst.glob("rank_*/checkpoint_*"))) < 24
    assert not list(dst.rglob(".reshard-tmp-*"))


@pytest.mark.long
def test_workers_skip_source_files_with_a_wrong_crc_as_a_local_run_does(cluster: DaskCluster, tmp_path: Path) -> None:
    world = World(tmp_path, PLAIN, single({"w": layout([2], [0, -1])}))
    for step in ("1_9", "1_10"):
        world.save(tensors(step, ["w"]), f"rank_{{rank}}/net-{step}.ckpt", crc=True)
    cluster.workers(2)
    for rank, step in ((1, "1_10"), (3, "1_9")):
        path = world.src / f"rank_{rank}" / "net-1_10.ckpt"
        with FileHandles() as handles:
            ((place, _),) = read_index(handles, str(path)).tensors["w"].extents
        sound = path.read_bytes()
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        result = cluster.run(*world.words("--json"))
        assert (result.status, result.json["step"]) == (0, step), result.err
        warns(result, f"warning: {path}: is damaged: its CRC is", f"rank {rank} counts as absent at step 1_10")
        created = files(world.dst)
        world.convert("--overwrite")
        assert files(world.dst) == created
        shutil.rmtree(world.dst)


@pytest.mark.long
def test_a_source_with_a_wrong_crc_gives_no_target(cluster: DaskCluster, world: World) -> None:
    world.save(tensors(), crc=True)
    cluster.workers(2)
    # The only one that is read whole; neither target alone takes all of it.
    path = world.src / "rank_1" / "net-1_10.ckpt"
    sound = path.read_bytes()
    with FileHandles() as handles:
        ((place, _),) = read_index(handles, str(path)).tensors["m.w"].extents
    path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
    result = cluster.run(*world.words())
    assert result.status == 3
    warns(result, path, "crc", "Dask worker")
    assert not world.dst.exists()
    assert cluster.run(*world.words("--crc", "never", "--dry-run")).status == 0
    path.write_bytes(sound)
    assert cluster.run(*world.words()).status == 0
    assert files(world.dst).keys() == {"rank_0/checkpoint_0.ckpt", "rank_1/checkpoint_1.ckpt", MANIFEST}


@pytest.mark.long
def test_workers_check_the_crcs_of_archives(cluster: DaskCluster, tmp_path: Path) -> None:
    (case,) = [case for case in fixtures() if case.name == "w2_old_metadata"]
    shutil.copytree(case.path, tmp_path / "src")
    path = tmp_path / "src" / "__0_0.distcp"
    sound = path.read_bytes()
    with FileHandles() as handles, handles.borrow(str(path)) as file:
        place = Archive(file, 0, 1577).entry("data/0").offset
    words: list[Argument] = ["convert", tmp_path / "src", tmp_path / "out", "--to", "dcp", "--shards", 2]
    cluster.workers(2)
    path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
    result = cluster.run(*words)
    assert result.status == 3
    warns(result, path, "CRC-32", "'a'", "Dask worker")
    assert not list((tmp_path / "out").glob("*.distcp"))
    path.write_bytes(sound)
    assert cluster.run(*words).status == 0
    done("verify", tmp_path / "out", "--src", tmp_path / "src")


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


@pytest.mark.parametrize(
    ("typed", "texts"),
    [
        (["--scheduler", "tcp://127.0.0.1:1", "--shard", "0/2"], "--shard and --scheduler"),
        (["--scheduler", "no-such-file.json"], "no address"),
    ],
)
def test_an_unreachable_scheduler_is_wrong_usage(world: World, typed: list[Argument], texts: str) -> None:
    world.save(tensors())
    world.refuses(2, texts, options=tuple(typed))


@pytest.mark.parametrize("typed", ["carrier-pigeon://1", "tcp://127.0.0.1", "tls://127.0.0.1:1"])
def test_an_address_that_dask_cannot_use_is_wrong_usage(world: World, typed: str) -> None:
    world.save(tensors())
    # In a separate process, because threads that Dask leaves appear at its end.
    result = reshard(*world.words("--scheduler", typed), subprocess_=True)
    assert result.status == 2
    warns(result, "Dask cannot use this address")


@pytest.mark.parametrize(
    "address",
    [
        "nowhere",
        "tcp://",
        "tcp://host",
        "tcp://host:0",
        "tcp://host:99999",
        "tcp://ho st:1",
        "tcp://a@host:1/x",
        "../:1/",
        "a" * 10**6,
    ],
)
def test_a_scheduler_file_without_a_valid_address_is_wrong_usage(world: World, address: str) -> None:
    world.save(tensors())
    file = world.root / "scheduler.json"
    file.write_text(json.dumps({"type": "Scheduler", "address": address}))
    result = world.refuses(2, file, "is not of the form tcp://host:8786", options=("--scheduler", file))
    assert len(result.err) < 1000


@pytest.mark.long
def test_a_tls_cluster_accepts_only_clients_with_its_certificates(large: Large, tmp_path: Path) -> None:
    reference, others = (make_certificate(tmp_path / "certificates", name) for name in ("known", "others"))
    required = {"DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "true"}
    dst = tmp_path / "dst"
    with DaskCluster(tmp_path / "cluster", "tls", {**reference, **required}) as cluster:
        cluster.workers(2)
        address = json.loads(cluster.file.read_text())["address"]
        assert address.startswith("tls://")
        assert cluster.run(*large.words(dst)).status == 0
        large.same(dst)
        refused = cluster.run(*large.words(tmp_path / "other", "--dry-run"), **others)
        assert refused.status == 2
        warns(refused, address, "do not agree on encryption", "certificate")
        without = cluster.run(*large.words(tmp_path / "other", "--dry-run"), **dict.fromkeys(reference, ""))
        assert without.status == 2
        warns(without, "Dask's configuration has no certificates for TLS")


def test_required_encryption_refuses_an_unencrypted_scheduler(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(tensors())
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION", "true")
    result = reshard(*world.words("--scheduler", "tcp://127.0.0.1:1"), subprocess_=True)
    assert result.status == 2
    warns(result, "requires encryption")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"address": 3}', "[" * 100000])
def test_a_file_that_is_not_a_scheduler_file_is_wrong_usage(world: World, content: str) -> None:
    world.save(tensors())
    file = world.root / "scheduler.json"
    file.write_text(content)
    world.refuses(2, "is not a scheduler file", file, options=("--scheduler", file))


@pytest.mark.long
def test_workers_read_the_key_of_encrypted_sources_from_its_file(
    cluster: DaskCluster, large: Large, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    src, dst, key = tmp_path / "src", tmp_path / "dst", tmp_path / "key"
    shutil.copytree(large.src, src)
    encrypt_tree(src, "AES-GCM", 5000)
    key.write_bytes(KEY)
    cluster.workers(2)
    words = [src if word == large.src else word for word in large.words(dst, "--decrypt-key-file", key)]
    result = cluster.run(*words)
    assert result.status == 0, result.err
    assert tree_bytes(dst) == tree_bytes(large.whole)
    assert all(KEY not in path.read_bytes() for path in (tmp_path / "cluster").rglob("*") if path.is_file())


def test_without_dask_the_error_names_the_extra_to_install(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(tensors())
    for name in [name for name in sys.modules if name.startswith("reshard.cluster")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "distributed", None)
    fails(2, *world.words("--scheduler", "tcp://127.0.0.1:1"), texts=["pip install '.[dask]'"])


def test_by_rank_has_no_scheduler(world: World) -> None:
    world.save(tensors())
    fails(2, *world.words(0, "--scheduler", "tcp://127.0.0.1:1", command="by-rank"), texts=["--scheduler"])


@pytest.mark.parametrize("command", ["transform-dir", "plan"])
def test_help_states_that_schedulers_are_trusted(command: str) -> None:
    assert "use only clusters that you trust: dask exchanges pickles" in flat(done(command, "--help").out)
