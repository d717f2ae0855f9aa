"""Killed runs into an object store: no half-written target is visible, and the next run completes it."""

from __future__ import annotations

import itertools
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, NamedTuple, Optional

import pytest

from reshard.storage.s3.leases import _machine
from tests.object_store import Objects
from tests.preloaded import Preloaded
from tests.running import Argument, done, fails, warns
from tests.small import SOURCE, TARGET, World, tensors
from tests.storage.test_writing_to_stores import tree, written
from tests.trees import layout, single, value

pytestmark = pytest.mark.long

MANIFEST = "reshard-manifest.json"
UNFINISHED = "reshard-unfinished.safetensors"
#: The options that write a form, and what its loaders wait for.
FORMS: dict[str, tuple[list[Argument], Optional[str]]] = {
    "ranks": ([], None),
    "parts": ([], None),
    "checkpoint2": (["--dst-strategy", "same"], "latest_checkpointed_iteration.txt"),
    "unified": (["--max-shard-size", "200"], "param_name_map.json"),
    "huggingface": (["--max-shard-size", "200"], "model.safetensors.index.json"),
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
    mark: Optional[str]

    def into(self, dst: str, *more: Argument) -> list[Argument]:
        return ["convert", *(dst if word == "{}" else word for word in self.words), *more]


def job(form: str, root: Path, label: str = "") -> Job:
    """A small conversion; files of `parts` are uploaded in two parts each."""
    options, mark = FORMS[form]
    if form == "parts":
        world = World(root, single({"w": layout([2], [0, -1])}), single({"w": layout([2], [-1, 0])}))
        world.save({"w": value(label + "w", (1024, 3000))})
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

    def __call__(self, number: int, method: str, path: str) -> Optional[str]:
        self.ready.wait(60)
        if method in ("GET", "HEAD") or self.of not in path:
            return None
        if next(self._counted) == self.at:
            self.done = True
            self.kill(self.what)
            if self.what == signal.SIGKILL:
                return "lost" if self.arrives else "drop"
        return None


LATE = 1.0
"""Seconds by which requests are late."""


class SlowKiller(Killer):
    """As `Killer`; the counted requests arrive late, if they write."""

    def __call__(self, number: int, method: str, path: str) -> Optional[str]:
        fault = super().__call__(number, method, path)
        if method == "PUT" and self.of in path:
            time.sleep(LATE)
        return fault


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


def check_nothing_is_half_written(objects: Objects, job: Job, before: Optional[Job] = None) -> None:
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


def check_nothing_is_left(objects: Objects, job: Job, ended: bool = True) -> None:
    """What stands there is what was asked for, and nothing that a run needs while it lives.

    Args:
        objects: where.
        job: what was asked for.
        ended: the last run that wrote something was not killed. One that was after it had written the manifest is
            followed by none that begins, so that its sign of life stays; no run takes it for alive.
    """
    files = written(objects)
    assert sorted(files) == sorted(job.whole)
    assert files == job.whole
    assert not uploads(objects)
    names = objects.content("out")
    assert not [name for name in names if ".reshard-tmp-" in name]
    assert MANIFEST in names
    # The records of one conversion.
    assert len({name.split("/")[1] for name in names if name.startswith(".reshard/") and name.count("/") > 1}) == 1
    if ended:
        assert not [name for name in names if "/lock." in name or "/sign." in name]
        assert names[".reshard/lock"] == b"free"


def uploads(objects: Objects) -> list[str]:
    actual = objects.client.list_multipart_uploads(Bucket=objects.bucket).get("Uploads", [])
    return [upload["Key"] for upload in actual]


def clear(objects: Objects) -> None:
    for name in objects.content():
        objects.client.delete_object(Bucket=objects.bucket, Key=name)


def status(preloaded: Preloaded, dst: str) -> Optional[dict[str, object]]:
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
    if printed is not None:
        assert not printed["writing"]
    has_command = printed is not None and any("/command." in name for name in content)
    again = ["resume", dst] if killer.at // 2 % 2 and has_command else job.into(dst)
    preloaded.done(*again)
    check_nothing_is_left(objects, job, ended=MANIFEST not in content)
    clear(objects)
    return killer.done


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
    assert at > 20


def stop_and_go_on(killer: Killer, job: Job, preloaded: Preloaded, objects: Objects) -> bool:
    """Ask a run at a request to end, see that it leaves nothing, and complete it; whether it came so far."""
    dst = objects.path("out")
    ended = interrupted(preloaded, objects, killer, job.into(dst))
    assert ended == (128 + killer.what if killer.done else 0)
    check_nothing_is_half_written(objects, job)
    assert not uploads(objects)
    names = objects.content("out")
    assert not [name for name in names if ".reshard-tmp-" in name or "/lock." in name or "/sign." in name]
    preloaded.done(*job.into(dst))
    check_nothing_is_left(objects, job)
    clear(objects)
    return killer.done


@pytest.mark.parametrize("kind, of", [(signal.SIGTERM, "partNumber="), (signal.SIGINT, ".reshard/lock")])
def test_a_terminated_run_leaves_no_upload(
    kind: int, of: str, preloaded: Preloaded, objects: Objects, tmp_path: Path
) -> None:
    assert stop_and_go_on(Killer(1, kind, of=of), job("parts", tmp_path), preloaded, objects)


@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.short), 1])
def test_a_run_terminated_during_a_trial_of_conditional_writes_leaves_nothing(
    at: int, preloaded: Preloaded, objects: Objects, tmp_path: Path
) -> None:
    """A request on its way must not arrive after the deletion of the object that it writes."""
    killer = SlowKiller(at, signal.SIGINT, of=".reshard/lock.")
    assert (
        interrupted(preloaded, objects, killer, job("ranks", tmp_path).into(objects.path("out"))) == 128 + signal.SIGINT
    )
    assert killer.done
    time.sleep(2 * LATE)
    assert not [name for name in objects.content("out") if "/lock." in name]


@pytest.mark.parametrize("form", ["parts", "unified"])
def test_a_run_terminated_at_any_request_leaves_no_upload(
    form: str, preloaded: Preloaded, objects: Objects, tmp_path: Path
) -> None:
    expected = job(form, tmp_path)
    for at in itertools.count(0, 4):
        killer = Killer(at, (signal.SIGTERM, signal.SIGINT)[at // 4 % 2])
        if not stop_and_go_on(killer, expected, preloaded, objects):
            break
    assert at > 20


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
    """Its upload of the same object is aborted once no other process uploads it."""
    expected = job("parts", tmp_path)
    dst = objects.path("out")
    parts = itertools.count()
    killed: list[Callable[[int], None]] = []

    def choose(number: int, method: str, path: str) -> Optional[str]:
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

    def choose(number: int, method: str, path: str) -> Optional[str]:
        if "partNumber=" in path:
            writing.set()
            go_on.wait(60)
        return None

    objects.faults.choose = choose
    run = preloaded.start(*expected.into(dst))
    assert writing.wait(60)
    printed = status(preloaded, dst)
    assert printed is not None and printed["writing"] and not printed["complete"]
    result = preloaded.start(*other.into(dst, "--overwrite")).result()
    assert result.status == 3 and "another conversion is writing" in result.err, result.err
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
    assert printed is not None
    if printed["complete"]:
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
    assert at > 20


def move_to_another_machine(objects: Objects) -> None:
    """Make all signs of life belong to a process of another machine."""
    holder = re.compile(rf"{_machine()}-([0-9]+-[0-9a-f]{{12}})")
    for key, content in objects.content().items():
        renamed_key = holder.sub(r"0badcafe-\1", key)
        renamed_content = holder.sub(r"0badcafe-\1", content.decode("latin-1")).encode("latin-1")
        if renamed_key != key:
            objects.client.delete_object(Bucket=objects.bucket, Key=key)
        if (renamed_key, renamed_content) != (key, content):
            objects.put(renamed_key, renamed_content)


def test_files_of_another_machine_stay_until_its_lease_expired(
    preloaded: Preloaded, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, other = job("parts", tmp_path / "one"), job("ranks", tmp_path / "other")
    dst = objects.path("out")
    killer = Killer(1, of="partNumber=")
    interrupted(preloaded, objects, killer, expected.into(dst))
    assert killer.done and uploads(objects)
    move_to_another_machine(objects)
    # It may still be alive: nothing of it is touched.
    printed = status(preloaded, dst)
    assert printed is not None and printed["writing"] and not printed["complete"]
    fails(3, *other.into(dst, "--overwrite"), texts=["another conversion is writing"])
    before = uploads(objects)
    done(*expected.into(dst))
    assert written(objects).items() >= expected.whole.items()
    assert set(uploads(objects)) <= set(before) != set()
    # The services' clocks count seconds.
    time.sleep(1.1)
    now = datetime.now(timezone.utc)
    monkeypatch.setattr("reshard.storage.s3.service.age_of", lambda modified, _: 1000.0 * (modified < now))
    # Nothing is left to do but that.
    done(*expected.into(dst))
    assert not uploads(objects)
    assert written(objects) == expected.whole
    assert done("status", dst, "--json").json["writing"] is False
    done(*other.into(dst, "--overwrite"))
    check_nothing_is_left(objects, other)


def test_a_lock_of_a_dead_machine_is_taken_over(
    preloaded: Preloaded, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = job("ranks", tmp_path)
    objects.put("out/.reshard/lock", b"0badcafe-1-0123456789ab 3")
    time.sleep(1.1)
    now = datetime.now(timezone.utc)
    monkeypatch.setattr("reshard.storage.s3.service.age_of", lambda modified, _: 1000.0 * (modified < now))
    done(*expected.into(objects.path("out")))
    check_nothing_is_left(objects, expected)


def test_a_lock_of_a_machine_that_just_died_is_waited_for(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits does not give up before the lock counts for nothing."""
    expected = job("ranks", tmp_path)
    objects.put("out/.reshard/lock", b"0badcafe-1-0123456789ab 3")
    monkeypatch.setattr("reshard.storage.s3.leases.DEAD_AFTER", 4.0)
    monkeypatch.setattr("reshard.storage.locks.GIVEN_UP_AFTER", 4.0)
    warns(done(*expected.into(objects.path("out"))), "waiting for", "which another process has locked")
    check_nothing_is_left(objects, expected)


@pytest.mark.parametrize("others", [True, False])
def test_waiting_continues_while_a_lock_changes_holders(
    others: bool, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = job("ranks", tmp_path)
    now = 0.0
    hands = itertools.count(1)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 50
        number = next(hands)
        holder = f"0badcafe-{number if others else 1}-0123456789ab {number}".encode()
        objects.put("out/.reshard/lock", holder if number < 20 else b"free")

    objects.put("out/.reshard/lock", b"0badcafe-1-0123456789ab 0")
    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: now)
    monkeypatch.setattr("reshard.storage.locks.time", clock)
    words = expected.into(objects.path("out"))
    if not others:
        fails(1, *words, texts=["another process has held this lock for 135 s"])
        assert next(hands) < 20
        return
    done(*words)
    check_nothing_is_left(objects, expected)
