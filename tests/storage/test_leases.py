"""Locks in object stores: at most one holder, released at its death, timed by the service's clock."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Optional

import pytest

from reshard.storage import store_of
from reshard.storage.s3 import S3Store, leases, s3_store
from reshard.storage.s3.service import service
from tests.corpus import ROOT
from tests.object_store import KEY, SECRET, Objects
from tests.storage.places import failing, try_often, wait_until_killed

pytestmark = pytest.mark.long

ELSEWHERE = "deadbeef-4711-0123456789ab"
"""Who holds something on another machine."""


class Waited(Exception):
    """Somebody else has the lock."""


def lives(objects: Objects, start: str) -> list[bool]:
    """For each object of records whose name begins so, whether the process in the rest of its name lives."""
    named = service(objects.path()).named(objects.path("run/.reshard"), start)
    return [leases.is_alive(name[len(start) :], listed.age) for name, listed in named]


def no_wait() -> None:
    raise Waited


def ignore_message(text: str) -> None:
    raise AssertionError(text)


def alone(
    objects: Objects, wait: Callable[[], None] = no_wait
) -> contextlib.AbstractContextManager[Callable[[], None]]:
    service = s3_store(objects.path())._service
    return leases.held_alone(service, objects.path("run/.reshard/lock"), wait, ignore_message)


def held(objects: Objects) -> bytes:
    return objects.content()["run/.reshard/lock"]


def count_up(objects: Objects) -> None:
    """What is wrong in the end if two do it at a time."""
    before = int(objects.client.get_object(Bucket=objects.bucket, Key="count")["Body"].read())
    time.sleep(0.01)
    objects.put("count", str(before + 1).encode())


@pytest.mark.parametrize("faults", ["none", "failing", "conflict"])
def test_two_threads_never_hold_one_lock(faults: str, objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    if faults == "failing":
        objects.faults.choose = failing
        try_often(monkeypatch)
    elif faults == "conflict":
        chosen = random.Random(1)
        objects.faults.choose = lambda number, method, path: (
            "conflict" if method == "PUT" and chosen.random() < 0.3 else None
        )
    objects.put("count", b"0")
    path = objects.path("run/.reshard/lock")

    def contend(number: int) -> None:
        for _ in range(3):
            with store_of(path).lock(path, lambda: None, lambda text: None):
                count_up(objects)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(contend, range(6)))
    assert objects.content() == {"count": b"18", "run/.reshard/lock": b"free"}


_CONTENDS = """
import os, sys, time, boto3
from reshard.storage import store_of
bucket, port, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = boto3.session.Session().client("s3", endpoint_url=port)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(times):
    path = f"s3://{bucket}/run/.reshard/lock"
    with store_of(path).lock(path, lambda: None, lambda text: None):
        before = int(client.get_object(Bucket=bucket, Key="count")["Body"].read())
        time.sleep(0.01)
        client.put_object(Bucket=bucket, Key="count", Body=str(before + 1).encode())
"""


def process(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_two_processes_never_hold_one_lock(objects: Objects) -> None:
    objects.put("count", b"0")
    started = [process(_CONTENDS, objects.bucket, objects.url, "5") for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for one in started:
            stack.enter_context(one)
        for one in started:
            assert one.stdout is not None and one.stdout.readline() == "ready\n"
        for one in started:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
    assert [one.returncode for one in started] == [0, 0, 0]
    assert objects.content() == {"count": b"15", "run/.reshard/lock": b"free"}


_HOLDS = """
import sys
from reshard.storage import store_of
store = store_of(sys.argv[1])
with store.lock(sys.argv[1], lambda: None, lambda text: None):
    sign = store.share(sys.argv[1] + "ed", lambda text: None)
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def holding(objects: Objects) -> Iterator[subprocess.Popen[str]]:
    with process(_HOLDS, objects.path("run/.reshard/lock")) as started:
        assert started.stdout is not None and started.stdout.readline() == "held\n"
        yield started
        started.communicate()


@pytest.mark.short
@pytest.mark.parametrize("asked_for", [True, False])
def test_a_lock_of_a_killed_local_process_is_taken_over_at_once(asked_for: bool, objects: Objects) -> None:
    store = s3_store(objects.path())
    with holding(objects) as holder:
        with pytest.raises(Waited), alone(objects):
            pass
        assert lives(objects, "locked.") == [True]
        holder.send_signal(signal.SIGKILL)
        if asked_for:
            holder.wait()
        else:
            # It stays listed until its parent waits for it, which some never do.
            wait_until_killed(holder.pid)
        with alone(objects):
            assert held(objects).startswith(leases._machine().encode())
        with store.try_lock(objects.path("run/.reshard/locked")) as answer:
            assert answer is True
    assert held(objects) == b"free"


def test_processes_hidden_by_proc_count_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: str, mode: str) -> None:
        raise FileNotFoundError(path)

    with process("") as ended:
        ended.communicate()
    # As with the option hidepid of /proc, for the processes of other users.
    monkeypatch.setattr(leases, "open", hidden, raising=False)
    names = {number: f"{leases._machine()}-{number}-0123456789ab" for number in (os.getpid(), ended.pid, 10**30)}
    assert [number for number, name in names.items() if leases.is_alive(name, 0)] == [os.getpid()]


@pytest.mark.short
def test_a_lock_of_another_machine_is_taken_over_after_its_lease_expired(objects: Objects) -> None:
    objects.put("run/.reshard/lock", f"{ELSEWHERE} 3".encode())
    objects.put(f"run/.reshard/shared.{ELSEWHERE}", b"")
    objects.put(f"run/.reshard/shared.{ELSEWHERE}.more", b"a name of something else")
    for clock, alive in ((0.0, True), (leases.DEAD_AFTER - 60, True), (leases.DEAD_AFTER + 5, False)):
        objects.faults.clock = clock
        assert lives(objects, "shared.") == [alive, False]
        if alive:
            with pytest.raises(Waited), alone(objects):
                pass
    # Its own renewal: it is alive.
    objects.put("run/.reshard/lock", f"{ELSEWHERE} 4".encode())
    objects.faults.clock = 0
    with pytest.raises(Waited), alone(objects):
        pass
    objects.faults.clock = leases.DEAD_AFTER + 5
    with alone(objects):
        assert ELSEWHERE.encode() not in held(objects)
    assert held(objects) == b"free"


@pytest.mark.short
@pytest.mark.parametrize("conditions", ["heed", "ignore"])
@pytest.mark.parametrize("again", [False, True])
def test_a_sign_of_life_renewed_during_its_removal_stays(again: bool, conditions: str, objects: Objects) -> None:
    key = f"run/.reshard/sign.{ELSEWHERE}"
    objects.put(key, b"1")
    store = s3_store(objects.path())
    objects.faults.conditions = conditions
    leases.has_conditional_writes(store._service, objects.path("run/.reshard/lock"))
    objects.faults.clock = leases.DEAD_AFTER + 5
    requests: list[str] = []

    def choose(number: int, method: str, path: str) -> None:
        if again and method in ("PUT", "DELETE") and not requests:
            requests.append(method)
            objects.put(key, b"2")

    objects.faults.choose = choose
    store.remove_dead_signs(objects.path("run/.reshard"))
    # Without conditional writes nothing is lost either: a live process renews its sign.
    assert objects.content() == ({key: b"2"} if again and conditions == "heed" else {})


def test_leases_do_not_depend_on_the_local_clock(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    objects.put("run/.reshard/lock", f"{ELSEWHERE} 3".encode())
    objects.put(f"run/.reshard/shared.{ELSEWHERE}", b"")

    def unused_clock() -> object:
        raise AssertionError

    monkeypatch.setattr("reshard.storage.s3.service._now", unused_clock)
    assert lives(objects, "shared.") == [True]
    with pytest.raises(Waited), alone(objects):
        pass


@pytest.fixture
def beating(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process renews its sign of life soon."""
    monkeypatch.setattr(leases, "PUT_AGAIN_AFTER", 0.05)
    monkeypatch.setattr(leases, "_heartbeat", leases._Heartbeat())


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


_FORKED_HOLDER = """
import os, sys, time
from reshard.storage import store_of
from reshard.storage.s3 import leases

leases.PUT_AGAIN_AFTER = 0.05
path = f"s3://{sys.argv[1]}/run/.reshard/lock"

def held():
    return store_of(path).lock(path, lambda: None, lambda text: None)

with held():
    pass
child = os.fork()
if not child:
    with held():
        store = store_of(path)
        versions = set()
        end = time.monotonic() + 60
        while len(versions) < 3 and time.monotonic() < end:
            versions.add(store.status(path).version)
            time.sleep(0.02)
        os._exit(len(versions) < 3)
sys.exit(os.waitpid(child, 0)[1] != 0)
"""


@pytest.mark.short
def test_a_forked_child_renews_its_own_lease(objects: Objects) -> None:
    subprocess.run([sys.executable, "-c", _FORKED_HOLDER, objects.bucket], check=True, timeout=100, cwd=ROOT)


@pytest.mark.usefixtures("beating")
@pytest.mark.parametrize("fails", [False, True])
def test_a_live_holder_renews_its_lease(fails: bool, objects: Objects) -> None:
    if fails:
        objects.faults.choose = failing
    shared = s3_store(objects.path()).share(objects.path("run/.reshard/shared"), ignore_message)
    key = shared.path.partition(f"{objects.bucket}/")[2]
    with alone(objects):
        until(lambda: int(held(objects).split()[1]) >= 3)
        until(lambda: int(objects.content()[key]) >= 3)
        shared.check()
        with pytest.raises(Waited), alone(objects):
            pass
    shared.release()
    assert objects.content() == {"run/.reshard/lock": b"free"}
    time.sleep(0.2)
    assert objects.content() == {"run/.reshard/lock": b"free"}


@pytest.mark.short
@pytest.mark.parametrize("silent", [0.0, 3 * leases.PUT_AGAIN_AFTER])
def test_a_holder_declared_dead_detects_it_and_stops(
    silent: float, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = leases._now
    shared = s3_store(objects.path()).share(objects.path("run/.reshard/shared"), ignore_message)
    shared.check()
    s3_store(objects.path()).remove(shared.path)
    monkeypatch.setattr(leases, "_now", lambda: plain() + silent)
    if not silent:
        shared.check()
        shared.put_again()
    with pytest.raises(OSError, match="another run removed this run's lock"):
        shared.check()
    shared.put_again()
    assert objects.content() == {}
    shared.release()


@pytest.mark.usefixtures("beating")
def test_a_failing_renewal_does_not_stop_other_renewals(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("unforeseen")

    wrong = s3_store(objects.path()).share(objects.path("run/.reshard/shared"), ignore_message)
    monkeypatch.setattr(wrong, "_put", fail)
    with alone(objects):
        until(lambda: int(held(objects).split()[1]) >= 3)
    wrong.release()


@pytest.mark.short
@pytest.mark.parametrize("now", [f"{ELSEWHERE} 0".encode(), b"free", None])
def test_a_lost_lock_is_not_released_for_its_new_holder(now: bytes, objects: Objects) -> None:
    with alone(objects):
        (lock,) = list(leases._heartbeat.leases)
        if now is None:
            objects.client.delete_object(Bucket=objects.bucket, Key="run/.reshard/lock")
        else:
            objects.put("run/.reshard/lock", now)
        lock.put_again()
        assert objects.content() == ({} if now is None else {"run/.reshard/lock": now})
        if now is None:
            # Had by another now.
            objects.put("run/.reshard/lock", f"{ELSEWHERE} 0".encode())
    assert held(objects) == (now or f"{ELSEWHERE} 0".encode())


@pytest.mark.short
@pytest.mark.parametrize("silent", [0.0, 3 * leases.PUT_AGAIN_AFTER])
def test_a_late_holder_checks_its_lock(silent: float, objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = leases._now
    with alone(objects) as check:
        check()
        monkeypatch.setattr(leases, "_now", lambda: plain() + silent)
        check()
        assert held(objects).endswith(b" 0" if not silent else b" 1")
        objects.put("run/.reshard/lock", f"{ELSEWHERE} 0".encode())
        monkeypatch.setattr(leases, "_now", lambda: plain() + 2 * silent)
        with pytest.raises(OSError, match="another run") if silent else contextlib.nullcontext():
            check()
    assert held(objects) == f"{ELSEWHERE} 0".encode()


@pytest.mark.parametrize("lost", range(1, 12))
def test_lost_responses_do_not_lose_the_lock(lost: int, objects: Objects) -> None:
    with alone(objects):
        (lock,) = list(leases._heartbeat.leases)
        remaining = [lost]

        def choose(number: int, method: str, path: str) -> Optional[str]:
            if method == "PUT" and remaining[0]:
                remaining[0] -= 1
                return "lost"
            return None

        objects.faults.choose = choose
        lock.put_again()
        lock.put_again()
        assert remaining == [0]
        with pytest.raises(Waited), alone(objects):
            pass
    assert held(objects) == b"free"


@pytest.mark.short
@pytest.mark.parametrize("conditions", ["ignore", "refuse"])
def test_a_service_without_conditional_writes_gives_a_warning_and_no_lock(conditions: str, objects: Objects) -> None:
    objects.faults.conditions = conditions
    output: list[str] = []
    store = s3_store(objects.path())
    path = objects.path("run/.reshard/lock")
    for _ in range(2):
        with (
            leases.held_alone(store._service, path, no_wait, output.append),
            leases.held_alone(store._service, path, no_wait, output.append),
        ):
            assert objects.content() == {}
    assert objects.content() == {}
    assert set(output) == {
        f"{objects.url.partition('//')[0]}//{objects.url.partition('//')[2]} has no conditional writes, by which runs "
        f"see each other: let no other run write to {objects.path('run')} at the same time"
    }
    # Signs of life use no conditional writes.
    shared = store.share(objects.path("run/.reshard/shared"), ignore_message)
    assert lives(objects, "shared.") == [True]
    shared.release()
    assert objects.content() == {}


@pytest.mark.parametrize("conditions", ["heed", "ignore", "refuse"])
def test_a_failing_network_does_not_change_the_recorded_abilities_of_a_service(
    conditions: str, objects: Objects
) -> None:
    objects.faults.conditions = conditions
    objects.faults.choose = failing
    requests = s3_store(objects.path())._service
    assert leases.has_conditional_writes(requests, objects.path("lock")) is (conditions == "heed")
    before = sum(objects.faults.requests.values())
    assert leases.has_conditional_writes(requests, objects.path("run/other")) is (conditions == "heed")
    assert sum(objects.faults.requests.values()) == before
    assert objects.content() == {}


def test_messages_about_locks_contain_no_secret(objects: Objects) -> None:
    message = []
    with alone(objects):
        message += [repr(objects.content())]
        objects.faults.choose = lambda *_: "refuse"
        with pytest.raises(PermissionError) as refused:
            s3_store(objects.path()).share(objects.path("run/.reshard/shared"), ignore_message)
        with pytest.raises(OSError) as also:
            store_of(objects.path()).write_whole(objects.path("x"), b"")
        objects.faults.choose = lambda *_: None
    message += [repr(refused.value), str(refused.value), str(also.value)]
    assert SECRET not in str(message) and KEY not in str(message)


def test_paths_of_one_service_share_one_store(objects: Objects) -> None:
    assert isinstance(store_of(objects.path("a")), S3Store) and store_of(objects.path("a")) is store_of(
        objects.path("b")
    )
