"""A real object store, Ceph's gateway: conversions from and into it, killed and concurrent runs."""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reshard.storage import use_endpoint
from tests.conformance import gateway
from tests.forms import to
from tests.object_store import KEY, SECRET, Bucket, use_service
from tests.preloaded import Preloaded, Run
from tests.running import Argument, done
from tests.small import World, tensors
from tests.storage.test_killed_store_runs import MANIFEST, Job, job
from tests.storage.test_writing_to_stores import written
from tests.trees import read_tree, same_ranks

FULL = tensors()
pytest.importorskip("boto3")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    missing = gateway.missing_programs()
    if missing:
        pytest.skip(f"Ceph's gateway is not installed (.ci/ceph installs it as root, with apt): {', '.join(missing)}")
    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(gateway.running(KEY, SECRET))
        except gateway.NotStartedError as error:
            pytest.skip(f"Ceph's gateway does not start here: {error}")
        yield running


@pytest.fixture(scope="module")
def preloaded(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded]:
    runs = Preloaded(tmp_path_factory.mktemp("runs"))
    yield runs
    runs.close()


@pytest.fixture
def bucket(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    import boto3

    from reshard.storage.s3 import service

    use_service(url, monkeypatch)
    service._service.cache_clear()
    use_endpoint(None)
    client = boto3.session.Session().client("s3")
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    yield Bucket(name, client)
    client.close()


def large(root: Path) -> Job:
    """A conversion that takes seconds: files of many parts."""
    return job("parts", root, rows=8192)


def wait_until(condition: Callable[[], object], run: Run) -> None:
    """Wait for a state of the store that a run brings about."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end and not run.has_ended
        time.sleep(0.01)


def records(bucket: Bucket) -> list[str]:
    return bucket.names("out/.reshard/done/")


@pytest.mark.parametrize("form", ["ranks", "checkpoint2", "huggingface", "dcp"])
def test_a_checkpoint_is_converted_into_and_out_of_a_gateway(form: str, world: World, bucket: Bucket) -> None:
    world.save(FULL)
    src, middle, back = bucket.upload(world.src, "src"), bucket.path("out"), bucket.path("back")
    into: list[Argument] = ["convert", src, middle, "--src-strategy", world.old, "--verify", *to(form, world)]
    done(*into)
    cut: list[Argument] = ["--src-strategy", world.new] if form == "ranks" else []
    done("convert", middle, back, *cut, "--dst-strategy", world.new, "--verify")
    for name, data in written(bucket, "back").items():
        path = world.dst / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    same_ranks(read_tree(world.dst), world.expected(FULL))
    before = bucket.content()
    done(*into)
    assert bucket.content() == before
    files = written(bucket)
    done(*into, "--overwrite")
    assert written(bucket) == files and not bucket.uploads()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["upload", "record"])
def test_a_run_that_a_signal_ends_is_completed_by_the_next(
    moment: str, kind: int, preloaded: Preloaded, bucket: Bucket, tmp_path: Path
) -> None:
    expected = large(tmp_path)
    run = preloaded.start(*expected.into(bucket.path("out")), "--jobs", 1)
    wait_until(bucket.uploads if moment == "upload" else lambda: records(bucket), run)
    run.send(kind)
    result = run.result()
    assert result.status == (-kind if kind == signal.SIGKILL else 128 + kind), result.err
    whole = {name: data for name, data in written(bucket).items() if name in expected.whole}
    assert all(data == expected.whole[name] for name, data in whole.items())
    assert MANIFEST not in bucket.names("out/")
    # A killed run leaves its uploads to a rule of the bucket.
    assert kind == signal.SIGKILL or not bucket.uploads()
    preloaded.done(*expected.into(bucket.path("out")), "--verify")
    assert written(bucket) == expected.whole


def test_two_runs_by_rank_complete_a_checkpoint_together(preloaded: Preloaded, bucket: Bucket, tmp_path: Path) -> None:
    expected = large(tmp_path)
    words = expected.into(bucket.path("out"))[1:]
    results = [run.result() for run in [preloaded.start("by-rank", rank, *words) for rank in (0, 1)]]
    assert [result.status for result in results] == [0, 0], [result.err for result in results]
    assert written(bucket) == expected.whole and MANIFEST in bucket.names("out/")
    assert not bucket.uploads()


def test_of_equal_runs_at_once_each_one_succeeds(preloaded: Preloaded, bucket: Bucket, tmp_path: Path) -> None:
    expected = job("ranks", tmp_path)
    results = [run.result() for run in [preloaded.start(*expected.into(bucket.path("out"))) for _ in range(4)]]
    assert [result.status for result in results] == [0] * 4, [result.err for result in results]
    assert written(bucket) == expected.whole


def test_another_conversion_is_refused_during_a_run(preloaded: Preloaded, bucket: Bucket, tmp_path: Path) -> None:
    expected, other = large(tmp_path / "one"), job("ranks", tmp_path / "other")
    run = preloaded.start(*expected.into(bucket.path("out")))
    wait_until(bucket.uploads, run)
    result = preloaded.start(*other.into(bucket.path("out"))).result()
    assert result.status == 3 and "another conversion" in result.err
    assert run.result().status == 0
    assert written(bucket) == expected.whole
