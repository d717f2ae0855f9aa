"""Worker processes: copies of this one, made by `fork`, that carry out requests of its threads.

A worker has all that this process has at that moment, such as the plan, so requests are small. It writes nothing
but what it is handed, and owns no file: it may be killed at any moment, and is when it is not needed any more.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Callable, NoReturn, Optional

from reshard.errors import RetryableError

if TYPE_CHECKING:
    import socket

Tell = Callable[[Any], None]
"""Passes something on before the answer to a request."""

Serve = Callable[[Any, Sequence[int], Tell], Any]
"""Carries out a request in a worker, given open descriptors that it has to close, and returns the answer."""

OWN_THREAD = "reshard-own"
"""What the names of threads begin with that hold no lock which a worker takes."""

WORTH_A_PROCESS = 64 << 20
"""Bytes: with fewer, a process costs more than it brings."""

BASE_OF_PROCESSES = 32 << 20
"""Of the 100 MiB that a command may take beside --max-memory, what all worker processes may."""

_MAX_PROCESSES = 64
_LENGTH = struct.Struct("<Q")
_TOLD, _DONE, _FAILED = range(3)
_MAX_DESCRIPTORS = 64
_SET_PARENT_DEATH_SIGNAL = 1
# Measured for 16 and 64 workers of a process with a small plan; see docs/benchmarks.md.
_MIN_PRIVATE = 4 << 20
# Of what was there before there was a plan, workers look at little. A small plan has fewer blocks of memory than this.
_BLOCKS, _USUAL_BLOCKS, _BYTES_PER_BLOCK = sys.getallocatedblocks(), 200_000, 100
# A signal between the fork and the first line of a worker would run the handlers of this process there.
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGALRM}


class LostWorkerError(RetryableError):
    """A worker process died."""

    usual_hint = "run the same command again; where memory is short, with fewer --jobs"


def other_threads() -> list[threading.Thread]:
    """All threads of Python in this process but the main one."""
    return [thread for thread in threading.enumerate() if thread is not threading.main_thread()]


def may_fork() -> bool:
    """Whether this process can be copied: another thread could hold a lock, which nobody gives up in a copy.

    The kernel ends workers with the thread that made them, so that has to be the main thread.
    """
    main = threading.current_thread() is threading.main_thread()
    return main and all(thread.name.startswith(OWN_THREAD) for thread in other_threads())


def anonymous_bytes() -> int:
    """Bytes of memory of this process that no file holds."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) << 10


def private_bytes() -> int:
    """Bytes that a copy of this process comes to hold by itself, at the most: Python writes to objects it looks at."""
    grown = sys.getallocatedblocks() - _BLOCKS
    return _MIN_PRIVATE + max(0, grown - _USUAL_BLOCKS) * _BYTES_PER_BLOCK


def worth_having(jobs: int, nbytes: int, max_memory: int, private: int) -> int:
    """How many processes are worth having; less than 2 for none.

    Args:
        jobs: CPUs to keep busy.
        nbytes: bytes that are to be moved or read.
        max_memory: bytes for all buffers together, of which half may go to what processes hold beside buffers.
        private: bytes that each process comes to hold beside its buffers.
    """
    return min(jobs, _MAX_PROCESSES, nbytes // WORTH_A_PROCESS, max(BASE_OF_PROCESSES, max_memory // 2) // private)


class Crew:
    """Worker processes with some threads each; any number of threads of this process may call them.

    Args:
        processes: how many.
        threads: requests that each carries out at a time.
        serve: carries them out.

    Raises:
        RetryableError: not even one process can be started.
    """

    def __init__(self, processes: int, threads: int, serve: Serve) -> None:
        # Loaded where it is needed: it takes a while.
        import ctypes
        import socket

        self._idle: queue.SimpleQueue[Seat] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._ends: list[socket.socket] = []
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        parent = os.getpid()
        seats = []
        # Pages stay shared as long as nobody writes to them; the collector would, in every worker.
        gc.freeze()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            for _ in range(processes):
                pairs: list[tuple[socket.socket, socket.socket]] = []
                try:
                    while len(pairs) < threads:
                        pairs.append(socket.socketpair())
                    with warnings.catch_warnings():
                        # Of threads that libraries have started for computations.
                        warnings.simplefilter("ignore", DeprecationWarning)
                        pid = os.fork()
                except OSError as error:
                    for end in itertools.chain(*pairs):
                        end.close()
                    if self._workers:
                        # Fewer do it, too.
                        break
                    raise RetryableError(
                        f"no worker process can be started: {error.strerror}",
                        hint="run the same command with --jobs 1",
                    ) from error
                self._ends += [mine for mine, _ in pairs]
                if not pid:
                    _work(parent, prctl, self._ends, [theirs for _, theirs in pairs], serve)
                worker = _Worker(pid)
                self._workers.append(worker)
                for mine, theirs in pairs:
                    theirs.close()
                    seats.append(Seat(mine, worker))
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            gc.unfreeze()
        # Requests of a moment go to several processes.
        for first in range(threads):
            for seat in seats[first::threads]:
                self._idle.put(seat)

    def call(self, request: object, descriptors: Sequence[int] = (), told: Tell = lambda message: None) -> Any:
        """Have a worker carry out a request; waits until one is free.

        Args:
            request: the request.
            descriptors: open files that the worker gets, too.
            told: called with what the worker tells before it answers, by this thread.

        Returns:
            The answer.

        Raises:
            LostWorkerError: the worker died.
            BaseException: what was raised there.
        """
        with self.seat() as seat:
            return seat.call(request, descriptors, told)

    @contextlib.contextmanager
    def seat(self) -> Iterator[Seat]:
        """A thread of a worker that nobody else calls while the block runs; waits until one is free."""
        seat = self._idle.get()
        try:
            yield seat
        finally:
            self._idle.put(seat)

    def kill(self) -> None:
        """Kill all workers; those who wait for them hear of it."""
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        self.kill()
        for worker in self._workers:
            worker.end()
        for end in self._ends:
            end.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """A process, until it was waited for."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._lock = threading.Lock()
        self._status: Optional[int] = None

    def kill(self) -> None:
        """Kill it."""
        with self._lock:
            if self._status is None:
                os.kill(self._pid, signal.SIGKILL)

    def end(self) -> str:
        """Wait for its end; how it ended."""
        with self._lock:
            if self._status is None:
                try:
                    self._status = os.waitpid(self._pid, 0)[1]
                except ChildProcessError:
                    # The program that this is a part of waits for all of its children.
                    return "ended"
        if os.WIFSIGNALED(self._status):
            number = os.WTERMSIG(self._status)
            return f"was killed by signal {number}" + (", for want of memory perhaps" if number == 9 else "")
        return f"ended with status {os.WEXITSTATUS(self._status)}"


class Seat:
    """What leads to one thread of a worker."""

    def __init__(self, end: socket.socket, worker: _Worker) -> None:
        self._end = end
        self._worker = worker
        # Unless an answer was left in the middle.
        self._heard_out = True

    def call(self, request: object, descriptors: Sequence[int] = (), told: Tell = lambda message: None) -> Any:
        """As `Crew.call`, of this thread."""
        try:
            if not self._heard_out:
                raise EOFError
            _send(self._end, pickle.dumps(request, pickle.HIGHEST_PROTOCOL), descriptors)
            kind, value = _receive(self._end)[0]
            while kind == _TOLD:
                told(value)
                kind, value = _receive(self._end)[0]
        except (EOFError, ConnectionError):
            raise LostWorkerError(f"a worker process {self._worker.end()}") from None
        except BaseException:
            # The rest of its answer would be taken for the answer to the next request.
            self._worker.kill()
            self._heard_out = False
            raise
        if kind == _DONE:
            return value
        error, where = value
        raise error from RuntimeError(where)


def _work(
    parent: int, prctl: Optional[Any], others: Sequence[socket.socket], ends: Sequence[socket.socket], serve: Serve
) -> NoReturn:
    """Be a worker, until nobody has requests any more."""
    try:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if prctl is not None:
            prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == parent:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            for end in others:
                end.close()
            threads = [threading.Thread(target=_answer, args=(end, serve)) for end in ends[1:]]
            for thread in threads:
                thread.start()
            _answer(ends[0], serve)
            for thread in threads:
                thread.join()
    finally:
        # Never as this process ends otherwise: what it would tidy up is its parent's.
        os._exit(0)


def _answer(end: socket.socket, serve: Serve) -> None:
    def tell(message: Any) -> None:
        _send(end, _packed(_TOLD, message))

    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            request, descriptors = _receive(end)
            try:
                answer = _packed(
                    _DONE, serve(request, descriptors, lambda message: _send(end, _packed(_TOLD, message)))
                )
            except BaseException as error:
                answer = _failed(error)
            _send(end, answer)


def _packed(kind: int, value: object) -> bytes:
    return pickle.dumps((kind, value), pickle.HIGHEST_PROTOCOL)


def _failed(error: BaseException) -> bytes:
    where = traceback.format_exc()
    try:
        packed = _packed(_FAILED, (error, where))
        pickle.loads(packed)
    except Exception:
        return _packed(_FAILED, (RuntimeError(str(error)), where))
    return packed


def _send(end: socket.socket, packed: bytes, descriptors: Sequence[int] = ()) -> None:
    import socket
    from array import array

    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    end.sendmsg([_LENGTH.pack(len(packed))], rights)
    end.sendall(packed)


def _receive(end: socket.socket) -> tuple[Any, list[int]]:
    """A message, and the descriptors that came with it.

    Raises:
        EOFError: nobody sends any more.
    """
    import socket
    from array import array

    room = array("i")
    data, rights, _, _ = end.recvmsg(_LENGTH.size, socket.CMSG_SPACE(_MAX_DESCRIPTORS * room.itemsize))
    for _, _, given in rights:
        room.frombytes(given[: len(given) // room.itemsize * room.itemsize])
    while 0 < len(data) < _LENGTH.size:
        data += _some(end, _LENGTH.size - len(data))
    if not data:
        raise EOFError
    (left,) = _LENGTH.unpack(data)
    packed = bytearray()
    while left > len(packed):
        packed += _some(end, min(left - len(packed), 1 << 20))
    return pickle.loads(packed), list(room)


def _some(end: socket.socket, most: int) -> bytes:
    data = end.recv(most)
    if not data:
        raise EOFError
    return data
