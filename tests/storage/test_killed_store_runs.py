"""Killed runs into an object store: no half-written target is visible, and the next run completes it."""

from __future__ import annotations

import itertools
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.object_store import Objects
from tests.preloaded import Preloaded
from tests.running import Argument, done
from tests.small import SOURCE, TARGET, World, tensors
from tests.storage.test_writing_to_stores import tree, written
from tests.trees import layout, single, value

pytestmark = pytest.mark.long

MANIFEST = "reshard-manifest.json"
UNFINISHED = "reshard-unfinished.safetensors"
#: The options that write a form, and what its loaders wait for.
FORMS: dict[str, tuple[list[Argument], str | None]] = {
    "ranks": ([], None),
    "parts": ([], None),
    "checkpoint2": (["--dst-strategy", "same"], "latest_checkpointed_iteration.txt"),
    "unified": (["--max-shard-size", "200B"], "param_name_map.json"),
    "huggingface": (["--max-shard-size", "200B"], "model.safetensors.index.json"),
    "hf-sharded": (["--shards", "4"], MANIFEST),
    "dcp": (["--shards", "4"], ".metadata"),
    "hyper-parallel": (["--shards", "4"], ".metadata"),
}


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory, object_server: int) -> Iterator[Preloaded]:
    actual = Preloaded(tmp_path_factory.mktemp("runs"))
    yield actual
    actual.close()


class Job(NamedTuple):
    """A conversion, and what it writes when nothing goes wrong.

    Attributes:
        words: of `convert`, `{}` in the place of DST.
        whole: by name.
        mark: what loaders wait for, if they wait.
    """

    words: list[Argument]
    whole: dict[str, bytes]
    mark: str | None

    def into(self, dst: str, *more: Argument) -> list[Argument]:
        return ["convert", *(dst if word == "{}" else word for word in self.words), *more]


def job(form: str, root: Path, label: str = "", rows: int = 1024) -> Job:
    """A small conversion; files of `parts` are uploaded in two parts each, of more `rows` in more parts."""
    options, mark = FORMS[form]
    if form == "parts":
        world = World(root, single({"w": layout([2], [0, -1])}), single({"w": layout([2], [-1, 0])}))
        world.save({"w": value(label + "w", (rows, 3000))})
    else:
        world = World(root, SOURCE, TARGET)
        world.save(tensors(label))
    to: list[Argument] = ["--dst-strategy", world.new] if mark is None else ["--to", form, *options]
    words: list[Argument] = [world.src, "{}", "--src-strategy", world.old, *to]
    actual = Job(words, {}, mark)
    done(*actual.into(str(root / "whole")))
    return actual._replace(whole=tree(root / "whole"))


class Killer:
    """Sends a process a signal when it makes its n-th request that changes something, counted from 0.

    Args:
        at: n.
        what: the signal.
        arrives: that request is heeded by the store.
        of: only requests whose paths hold this count.
    """

    def __init__(self, at: int, kind: int = signal.SIGKILL, arrives: bool = False, of: str = "") -> None:
        self.at, self.what, self.arrives, self.of = at, kind, arrives, of
        self.kill: Callable[[int], None] = lambda kind: None
        self.ready = threading.Event()
        self.done = False
        self._counted = itertools.count()

    def __call__(self, number: int, method: str, path: str) -> str | None:
        self.ready.wait(60)
        if method in ("GET", "HEAD") or self.of not in path:
            return None
        if next(self._counted) == self.at:
            self.done = True
            self.kill(self.what)
            if self.what == signal.SIGKILL:
                return "lost" if self.arrives else "drop"
        return None


def interrupted(preloaded: Preloaded, objects: Objects, killer: Killer, words: list[Argument]) -> int:
    """Run a command that gets a signal at a request; its status."""
    objects.faults.choose = killer
    run = preloaded.start(*words)
    killer.kill = run.send
    killer.ready.set()
    result = run.result()
    objects.faults.choose = lambda *_: None
    assert "Traceback" not in result.err, result.err
    return result.status


def check_nothing_is_half_written(objects: Objects, job: Job, before: Job | None = None) -> None:
    """Files under final names are whole, and the file that marks completion is written last."""
    content = objects.content("out")
    actual = {name: data for name, data in content.items() if name in job.whole and name != UNFINISHED}
    for name, data in actual.items():
        assert data in (job.whole[name], *([before.whole[name]] if before and name in before.whole else ())), name
    weights = {name for name in job.whole if name.endswith((".safetensors", ".ckpt", ".distcp"))}
    if before is None and (MANIFEST in content or (job.mark or MANIFEST) in content):
        assert weights <= set(actual)
    if before is None and job.mark is not None and weights & set(actual) and not weights <= set(actual):
        assert any(name.rpartition("/")[2] == UNFINISHED for name in content)


def check_nothing_is_left(objects: Objects, job: Job) -> None:
    """What stands there is what was asked for; uploads of killed runs are left to a rule of the bucket."""
    files = written(objects)
    assert sorted(files) == sorted(job.whole)
    assert files == job.whole
    assert MANIFEST in objects.content("out")


def uploads(objects: Objects) -> list[str]:
    actual = objects.client.list_multipart_uploads(Bucket=objects.bucket).get("Uploads", [])
    return [upload["Key"] for upload in actual]


def clear(objects: Objects) -> None:
    for name in objects.content():
        objects.client.delete_object(Bucket=objects.bucket, Key=name)


def status(preloaded: Preloaded, dst: str) -> dict[str, object] | None:
    """The output of `status` for a directory; None without a conversion."""
    result = preloaded.start("status", dst, "--json").result()
    if result.status == 3:
        assert "holds no records of a conversion" in result.err
        return None
    document: dict[str, object] = json.loads(result.err)
    return document


def kill_and_go_on(killer: Killer, job: Job, preloaded: Preloaded, objects: Objects) -> bool:
    """Kill a run at a request, check the directory, and complete it; returns whether the request was reached."""
    dst = objects.path("out")
    ended = interrupted(preloaded, objects, killer, job.into(dst))
    assert ended == (-signal.SIGKILL if killer.done else 0)
    check_nothing_is_half_written(objects, job)
    printed = status(preloaded, dst)
    weights = {name for name in job.whole if name.endswith((".safetensors", ".ckpt", ".distcp"))}
    content = objects.content("out")
    assert (printed is not None and printed["complete"]) == (weights <= set(content) and MANIFEST in content)
    has_command = printed is not None and any("/command." in name for name in content)
    again = ["resume", dst] if killer.at // 2 % 2 and has_command else job.into(dst)
    preloaded.done(*again)
    check_nothing_is_left(objects, job)
    clear(objects)
    return killer.done


@pytest.mark.deep
@pytest.mark.short
@pytest.mark.parametrize("form, at, of", [("parts", 2, "partNumber=")])
def test_the_next_run_completes_a_killed_one(
    form: str, at: int, of: str, preloaded: Preloaded, objects: Objects, tmp_path: Path
) -> None:
    assert kill_and_go_on(Killer(at, of=of), job(form, tmp_path), preloaded, objects)


@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_run_killed_at_any_request_is_completed_by_the_next(
    form: str, arrives: bool, preloaded: Preloaded, objects: Objects, tmp_path: Path
) -> None:
    expected = job(form, tmp_path)
    # The requests of files and records are alike in all forms.
    step = 2 if form in ("ranks", "parts") else 6
    for at in itertools.count(arrives * step // 2, step):
        if not kill_and_go_on(Killer(at, arrives=arrives), expected, preloaded, objects):
            break
    assert at > 12


def stop_and_go_on(killer: Killer, job: Job, preloaded: Preloaded, objects: Objects) -> bool:
    """Ask a run at a request to end, see that it leaves nothing, and complete it; whether it came so far."""
    dst = objects.path("out")
    ended = interrupted(preloaded, objects, killer, job.into(dst))
    assert ended == (128 + killer.what if killer.done else 0)
    check_nothing_is_half_written(objects, job)
    assert not uploads(objects)
    preloaded.done(*job.into(dst))
    check_nothing_is_left(objects, job)
    clear(objects)
    return killer.done


@pytest.mark.parametrize("kind, of", [(signal.SIGTERM, "partNumber="), (signal.SIGINT, ".reshard/done")])
def test_a_terminated_run_leaves_no_upload(
    kind: int, of: str, preloaded: Preloaded, objects: Objects, tmp_path: Path
) -> None:
    assert stop_and_go_on(Killer(1, kind, of=of), job("parts", tmp_path), preloaded, objects)


@pytest.mark.parametrize("form", ["parts", "unified"])
def test_a_run_terminated_at_any_request_leaves_no_upload(
    form: str, preloaded: Preloaded, objects: Objects, tmp_path: Path
) -> None:
    expected = job(form, tmp_path)
    for at in itertools.count(0, 4):
        killer = Killer(at, (signal.SIGTERM, signal.SIGINT)[at // 4 % 2])
        if not stop_and_go_on(killer, expected, preloaded, objects):
            break
    assert at > 12


def test_concurrent_runs_give_one_checkpoint(preloaded: Preloaded, objects: Objects, tmp_path: Path) -> None:
    """Two of the same files, and two of one rank each."""
    expected = job("parts", tmp_path)
    dst = objects.path("out")
    ranks = [["by-rank", rank, *expected.into(dst)[1:]] for rank in (0, 1)]
    runs = [preloaded.start(*words) for words in (expected.into(dst), expected.into(dst), *ranks)]
    results = [run.result() for run in runs]
    assert [result.status for result in results] == [0] * 4, [result.err for result in results]
    check_nothing_is_left(objects, expected)


def test_a_killed_run_does_not_affect_a_concurrent_one(preloaded: Preloaded, objects: Objects, tmp_path: Path) -> None:
    expected = job("parts", tmp_path)
    dst = objects.path("out")
    parts = itertools.count()
    killed: list[Callable[[int], None]] = []

    def choose(number: int, method: str, path: str) -> str | None:
        if "partNumber=" in path and killed and next(parts) == 1:
            killed.pop()(signal.SIGKILL)
        return None

    objects.faults.choose = choose
    first = preloaded.start(*expected.into(dst))
    killed.append(first.send)
    second = preloaded.start(*expected.into(dst))
    first.result()
    assert second.result().status == 0, second.result().err
    objects.faults.choose = lambda *_: None
    preloaded.done(*expected.into(dst))
    assert written(objects) == expected.whole


def test_another_conversion_is_refused_during_a_run(preloaded: Preloaded, objects: Objects, tmp_path: Path) -> None:
    expected, other = job("parts", tmp_path / "one"), job("ranks", tmp_path / "other")
    dst = objects.path("out")
    writing, go_on = threading.Event(), threading.Event()

    def choose(number: int, method: str, path: str) -> str | None:
        if "partNumber=" in path:
            writing.set()
            go_on.wait(60)
        return None

    objects.faults.choose = choose
    run = preloaded.start(*expected.into(dst))
    assert writing.wait(60)
    printed = status(preloaded, dst)
    assert printed is not None and not printed["complete"]
    result = preloaded.start(*other.into(dst)).result()
    assert result.status == 3 and "another conversion" in result.err, result.err
    go_on.set()
    assert run.result().status == 0, run.result().err
    check_nothing_is_left(objects, expected)
    result = preloaded.start(*other.into(dst)).result()
    assert result.status == 3 and "holds another conversion" in result.err, result.err
    check_nothing_is_left(objects, expected)


def overwrite_after_kill(killer: Killer, before: Job, job: Job, preloaded: Preloaded, objects: Objects) -> bool:
    """Fill a directory, kill the run that replaces it at a request, and give it again; whether it came so far."""
    dst = objects.path("out")
    preloaded.done(*before.into(dst))
    interrupted(preloaded, objects, killer, job.into(dst, "--overwrite"))
    check_nothing_is_half_written(objects, job, before)
    printed = status(preloaded, dst)
    if printed is not None and printed["complete"]:
        assert written(objects) in (before.whole, job.whole)
    preloaded.done(*job.into(dst, "--overwrite"))
    check_nothing_is_left(objects, job)
    clear(objects)
    return killer.done


PAIRS = [("ranks", "ranks"), ("unified", "huggingface"), ("checkpoint2", "ranks"), ("ranks", "unified")]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_run_with_overwrite_killed_at_any_request_is_completed_by_the_next(
    pair: tuple[str, str], preloaded: Preloaded, objects: Objects, tmp_path: Path
) -> None:
    before, after = job(pair[0], tmp_path / "before", "old"), job(pair[1], tmp_path / "after", "new")
    for at in itertools.count(0, 6):
        if not overwrite_after_kill(Killer(at), before, after, preloaded, objects):
            break
    assert at > 12
