"""A signal at any moment ends a run with 129, 130 or 143, without half-written files and without a traceback.

`tests/execute/test_interruption.py` stops long runs, too, and looks at what the next one makes of it.
"""

from __future__ import annotations

import fcntl
import os
import pty
import random
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from reshard.defaults import usable_cpus
from tests.conftest import LONG
from tests.dask_cluster import until
from tests.running import Argument, Result, done
from tests.small import World, tensors
from tests.trees import same_ranks, tree_bytes

FULL = tensors()
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
SOME = 300 if LONG else 9

# Sends itself a signal at the given call or return after its handlers are installed, the last one included. If there
# are fewer, it prints how many there were.
AT_EVENT = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
number, at = map(int, sys.argv[1:3]); del sys.argv[1:3]
events, plain = 0, os._exit
def leave(status):
    if events < at:
        os.write(2, b"%d events" % events)
    plain(status)
def count(frame, event, arg):
    global events
    if events or callable(signal.getsignal(signal.SIGTERM)):
        events += 1
        if events == at:
            sys.setprofile(None)
            os.kill(os.getpid(), number)
os._exit = leave
sys.setprofile(count)
from reshard.entry import main
main()
"""

# Says when it leaves, in nanoseconds, as its last word.
WITH_TIME = """
import os, signal, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)
plain = os._exit
def leave(status):
    os.write(2, b"left at %d" % time.monotonic_ns())
    plain(status)
os._exit = leave
from reshard.entry import main
main()
"""


def python(script: str, *words: Argument) -> Result:
    """Run a Python script."""
    process = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)], capture_output=True, text=True, timeout=120
    )
    return Result(process.returncode, process.stdout, process.stderr)


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process, which is gone afterwards."""
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(status: int, message: str, number: int) -> None:
    """A run ended as signals end it."""
    assert status == 128 + number, message
    assert re.search("terminated|interrupted|hangup", message)
    # Python prints an exception that a weak reference's callback raises, as in its list of threads, and goes on.
    message = re.sub(r"Exception ignored in: <function WeakSet.*?Stopped: [^\n]*\n", "", message, flags=re.DOTALL)
    assert not re.search("Traceback|ignored|Aborted", message), message


def nothing_half_written(dst: Path, whole: dict[str, bytes]) -> None:
    """Files under final names are whole, and no temporary file remains."""
    assert not list(dst.rglob(".reshard-tmp-*"))
    for path in dst.glob("rank_*/*"):
        name = str(path.relative_to(dst))
        assert path.read_bytes() == whole[name], name


def handles(process: int, number: signal.Signals) -> bool:
    """Whether a process handles a signal by now."""
    caught = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{process}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) & 1 << (number - 1))


@pytest.mark.deep
@pytest.mark.parametrize("command", ["convert", "verify", "show"])
def test_a_signal_at_any_call_ends_the_run(world: World, command: str) -> None:
    world.save(FULL)
    world.convert()
    whole = tree_bytes(world.dst)

    def run(number: int, at: int, dst: Path) -> Result:
        words: dict[str, list[Argument]] = {
            "convert": [dst if word == world.dst else word for word in world.words("--jobs", "2")],
            "verify": ["verify", world.dst],
            "show": ["strategy", "show", world.old],
        }
        return python(AT_EVENT, int(number), at, *words[command])

    match = re.search(r"(\d+) events", run(signal.SIGTERM, 1 << 60, world.root / "first").err)
    assert match is not None
    events = int(match[1])

    def stop(seed: int) -> bool:
        chance = random.Random(seed)
        at = chance.choice([chance.randint(1, events), events - chance.randint(0, 200)])
        number, dst = chance.choice(SIGNALS), world.root / f"dst{seed}"
        result = run(number, at, dst)
        if "events" in result.err:
            # It was a little less to do this time.
            return False
        ended(result.status, result.err, number)
        nothing_half_written(dst, whole)
        return True

    with ThreadPoolExecutor(usable_cpus()) as pool:
        assert sum(pool.map(stop, range(SOME // 3))) > SOME // 6


@pytest.mark.deep
def test_a_signal_at_any_time_ends_the_run(world: World) -> None:
    world.save(FULL)
    world.convert()
    whole = tree_bytes(world.dst)
    begun = time.monotonic()
    python(WITH_TIME, *world.words("--overwrite"))
    life = time.monotonic() - begun

    def stop(seed: int) -> bool:
        chance = random.Random(seed)
        number, dst = chance.choice(SIGNALS), world.root / f"dst{seed}"
        words = [str(dst if word == world.dst else word) for word in world.words("--jobs", "2")]
        with started("-c", WITH_TIME, *words) as process:
            until(lambda: process.poll() is not None or handles(process.pid, signal.SIGTERM))
            time.sleep(chance.uniform(0, 1.2 * life))
            process.send_signal(number)
            sent = time.monotonic_ns()
            _, output = process.communicate(timeout=60)
        match = re.search(r"left at (\d+)", output)
        assert match is not None, output
        nothing_half_written(dst, whole)
        if process.returncode == 0:
            assert int(match[1]) < sent, output
            return False
        ended(process.returncode, output, number)
        done(*words)
        assert tree_bytes(dst).keys() == whole.keys()
        nothing_half_written(dst, whole)
        return True

    # One more than there are CPUs, so that there are delays of every length.
    with ThreadPoolExecutor(usable_cpus() + 1) as pool:
        assert sum(pool.map(stop, range(SOME))) > SOME // 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ignored_signals_stay_ignored(world: World, number: signal.Signals) -> None:
    """As in `reshard ... &` of a shell script, where Ctrl-C is meant for others, and under nohup."""
    world.save(FULL)
    script = AT_EVENT.replace("number, at", f"signal.signal({int(number)}, signal.SIG_IGN); number, at", 1)
    result = python(script, int(number), 100_000, *world.words())
    assert result.status == 0 and "events" not in result.err, result.err
    same_ranks(world.found(), world.expected(FULL))


LOST = {
    "in a destructor": """
    class Last:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
    last = Last()
    del last
    time.sleep(60)
""",
    "in code that goes on after anything": """
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        time.sleep(60)
""",
    "in code that goes on, and is nearly done": """
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        pass
""",
    "in code that makes another error of it": """
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException as error:
        raise ReshardError("something else") from error
""",
}


@pytest.mark.deep
@pytest.mark.parametrize("where", LOST)
def test_a_signal_ends_the_run_although_its_exception_is_swallowed(where: str) -> None:
    script = f"""
import os, signal, time
from reshard import signals
from reshard.errors import ReshardError
signals.PATIENCE = 0.5
signals.install()
try:
  with signals.unwinding():{LOST[where]}
except signals.Stopped as stop:
    os.write(2, str(stop).encode())
    signals.leave(stop.status)
"""
    result = python(script)
    assert result.status == 143 and "terminated" in result.err, result.err


# The disk takes a minute to flush a target.
SLOW_DISK = """
import os, sys, threading, time
from reshard import signals
signals.PATIENCE = float(sys.argv.pop(1))
plain = os.fsync
def flush(fd):
    if threading.current_thread() is threading.main_thread():
        return plain(fd)
    print("flushing")
    time.sleep(60)
os.fsync = flush
from reshard.entry import main
main()
"""


@pytest.mark.deep
def test_a_timeout_ends_a_run_on_a_slow_disk(world: World) -> None:
    world.save(FULL)
    words = ["-c", SLOW_DISK, "1", *map(str, world.words())]
    with started(*words) as process:
        assert process.stdout is not None and process.stdout.readline() == "flushing\n"
        process.send_signal(signal.SIGTERM)
        # A launcher and a terminal may send the same signal twice.
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=20)
    ended(process.returncode, output, signal.SIGTERM)
    nothing_half_written(world.dst, {})


@pytest.mark.deep
def test_a_closed_terminal_ends_the_run(world: World) -> None:
    world.save(FULL)
    terminal, end = pty.openpty()

    def control() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    words = [sys.executable, "-c", SLOW_DISK, "1", *map(str, world.words())]
    with subprocess.Popen(words, stdin=end, stdout=end, stderr=end, start_new_session=True, preexec_fn=control) as run:
        os.close(end)
        with open(terminal, "rb", 0) as output:
            while b"flushing" not in output.read(1000):
                pass
        assert run.wait(20) == 129
    nothing_half_written(world.dst, {})
