"""Worker processes: copies of this process, made by `fork`, that carry out requests of its threads.

A worker starts with a copy of this process's memory, such as the plan, so requests are small. It writes only to
descriptors that it receives, and owns no file: it can be killed at any moment, and is killed at the end.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from reshard.errors import RetryableError

Notify = Callable[[Any], None]
"""Receives a message that a worker sends before its answer."""

Serve = Callable[[Any, Sequence[int], Notify], Any]
"""Carries out a request in a worker and returns the answer; it closes the descriptors that it receives."""

OWN_THREAD = "reshard-own"
"""Prefix of the names of threads that hold no lock which a worker takes."""

MIN_BYTES_PER_PROCESS = 64 << 20
"""Minimum bytes of work per process: starting a process costs about a tenth of the time to move them."""

MIN_MEMORY_PER_CPU = 2 << 20
"""Minimum bytes of buffers for each CPU: smaller blocks cost more calls than another CPU saves."""

BASE_OF_PROCESSES = 32 << 20
"""Memory of all worker processes beside buffers, part of the 100 MiB that a command may take beside --max-memory."""

_MAX_PROCESSES = 64
_LENGTH = struct.Struct("<Q")
_MESSAGE, _ANSWER, _ERROR = range(3)
_MAX_DESCRIPTORS = 64
_SET_PARENT_DEATH_SIGNAL = 1
# Measured for 16 and 64 workers of a process with a small plan; see CONTRIBUTING.md, Measured.
_MIN_PRIVATE = 4 << 20
# Workers use few of the objects that were made before the plan. A small plan takes fewer blocks of memory than this.
_BLOCKS, _USUAL_BLOCKS, _BYTES_PER_BLOCK = sys.getallocatedblocks(), 200_000, 100
# Blocked during a fork: else a signal could run this process's handlers in the worker.
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM}


class LostWorkerError(RetryableError):
    """A worker process died."""

    usual_hint = "run the same command again; where memory is short, with fewer --jobs"


def other_threads() -> list[threading.Thread]:
    """All Python threads of this process except the main thread."""
    return [thread for thread in threading.enumerate() if thread is not threading.main_thread()]


def may_fork() -> bool:
    """Whether this process can be forked: a lock that another thread holds would never be released in the copy.

    Only the main thread forks: the kernel kills workers at the end of the thread that forked them.
    """
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and all(thread.name.startswith(OWN_THREAD) for thread in other_threads())


def anonymous_bytes() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) << 10


def reuse_memory(nbytes: int) -> None:
    """Have the memory of freed buffers up to a size used for the next ones.

    Measured, so: without it, each comes from the kernel as pages of zeros, which takes three times as long as `diff` or
    a comparison of all replicas.
    """
    # Once glibc has freed a buffer, of less than 32 MiB, it keeps the memory of smaller ones, up to twice its size.
    bytearray(min(2 * nbytes, 31 << 20))


def private_bytes() -> int:
    """Upper bound of the bytes that a worker does not share with this process: Python writes to objects it reads."""
    blocks = sys.getallocatedblocks() - _BLOCKS
    return _MIN_PRIVATE + max(0, blocks - _USUAL_BLOCKS) * _BYTES_PER_BLOCK


def process_count(jobs: int, nbytes: int, max_memory: int, private: int) -> int:
    """The number of worker processes for some work; less than 2 for none.

    Args:
        jobs: CPUs to keep busy.
        nbytes: bytes to move or read.
        max_memory: bytes for all buffers together; half of it may go to the private bytes of processes.
        private: bytes of each process beside its buffers.
    """
    room = max(BASE_OF_PROCESSES, max_memory // 2)
    most = min(_MAX_PROCESSES, room // private, max_memory // MIN_MEMORY_PER_CPU)
    return min(jobs, most, nbytes // MIN_BYTES_PER_PROCESS)


class Crew:
    """Worker processes with some threads each; any number of threads of this process may call them.

    Args:
        processes: number of processes; fewer are used if the system starts fewer.
        threads: requests that each process carries out at a time.
        serve: carries them out.

    Raises:
        RetryableError: no process can be started.
    """

    def __init__(self, processes: int, threads: int, serve: Serve) -> None:
        # A slow import.
        import ctypes

        self._idle: queue.SimpleQueue[Seat] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._ends: list[socket.socket] = []
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        parent = os.getpid()
        seats = []
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            for _ in range(processes):
                pairs: list[tuple[socket.socket, socket.socket]] = []
                try:
                    while len(pairs) < threads:
                        pairs.append(socket.socketpair())
                    with warnings.catch_warnings():
                        # Python warns of threads that libraries have started for computations.
                        warnings.simplefilter("ignore", DeprecationWarning)
                        pid = os.fork()
                except OSError as error:
                    for end in itertools.chain(*pairs):
                        end.close()
                    if self._workers:
                        break
                    raise RetryableError(
                        f"no worker process can be started: {error.strerror}",
                        hint="run the same command with --jobs 1",
                    ) from error
                self._ends += [end for end, _ in pairs]
                if not pid:
                    _work(parent, prctl, self._ends, [end for _, end in pairs], serve)
                worker = _Worker(pid)
                self._workers.append(worker)
                for end, workers_end in pairs:
                    workers_end.close()
                    seats.append(Seat(end, worker))
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Simultaneous requests go to different processes.
        for first in range(threads):
            for seat in seats[first::threads]:
                self._idle.put(seat)

    def call(self, request: object, descriptors: Sequence[int] = (), notify: Notify = lambda message: None) -> Any:
        """Have a worker carry out a request; waits for a free worker.

        Args:
            request: the request.
            descriptors: open files that are sent to the worker.
            notify: called in this thread with the messages that the worker sends before its answer.

        Raises:
            LostWorkerError: the worker died.
            BaseException: raised in the worker.
        """
        with self.seat() as seat:
            return seat.call(request, descriptors, notify)

    @contextlib.contextmanager
    def seat(self) -> Iterator[Seat]:
        """A thread of a worker, reserved while the block runs; waits for a free one."""
        seat = self._idle.get()
        try:
            yield seat
        finally:
            self._idle.put(seat)

    def kill(self) -> None:
        """Kill all workers; calls that wait for them raise `LostWorkerError`."""
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
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
    """A worker process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._lock = threading.Lock()
        self._status: int | None = None

    def kill(self) -> None:
        with self._lock:
            if self._status is None:
                os.kill(self._pid, signal.SIGKILL)

    def end(self) -> str:
        """Wait for its end and describe it, as in ``was killed by signal 9``."""
        with self._lock:
            if self._status is None:
                try:
                    self._status = os.waitpid(self._pid, 0)[1]
                except ChildProcessError:
                    # The embedding program has waited for all of its children.
                    return "ended"
        if os.WIFSIGNALED(self._status):
            number = os.WTERMSIG(self._status)
            return f"was killed by signal {number}" + (" (out of memory?)" if number == signal.SIGKILL else "")
        return f"ended with status {os.WEXITSTATUS(self._status)}"


class Seat:
    """The connection to one thread of a worker."""

    def __init__(self, end: socket.socket, worker: _Worker) -> None:
        self._end = end
        self._worker = worker
        # A part of an answer is still unread.
        self._interrupted = False

    def call(self, request: object, descriptors: Sequence[int] = (), notify: Notify = lambda message: None) -> Any:
        """As `Crew.call`, in this thread of the worker."""
        try:
            if self._interrupted:
                raise EOFError
            _send(self._end, _packed(request), descriptors)
            kind, value = _receive(self._end)[0]
            while kind == _MESSAGE:
                notify(value)
                kind, value = _receive(self._end)[0]
        except (EOFError, ConnectionError):
            raise LostWorkerError(f"a worker process {self._worker.end()}") from None
        except BaseException:
            # The rest of its answer would be read as the answer to the next request.
            self._worker.kill()
            self._interrupted = True
            raise
        if kind == _ANSWER:
            return value
        error, trace = value
        raise error from RuntimeError(trace)


def _work(
    parent: int,
    prctl: Any | None,
    parents_ends: Sequence[socket.socket],
    ends: Sequence[socket.socket],
    serve: Serve,
) -> NoReturn:
    """Carry out requests in a worker until the parent closes its ends."""
    try:
        # The collector would write to all objects, so that their pages are no longer shared. Frozen only here: an
        # embedding program may have frozen objects of its own.
        gc.freeze()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if prctl is not None:
            prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == parent:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            for end in parents_ends:
                end.close()
            threads = [threading.Thread(target=_answer, args=(end, serve)) for end in ends[1:]]
            for thread in threads:
                thread.start()
            _answer(ends[0], serve)
            for thread in threads:
                thread.join()
    finally:
        # No other way out: handlers at exit would tidy up files of the parent.
        os._exit(0)


def _answer(end: socket.socket, serve: Serve) -> None:

    def notify(message: Any) -> None:
        _send(end, _packed(_MESSAGE, message))

    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            (request,), descriptors = _receive(end)
            try:
                answer = _packed(_ANSWER, serve(request, descriptors, notify))
            except BaseException as error:
                answer = _packed_error(error)
            _send(end, answer)


def _packed(*message: object) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def _packed_error(error: BaseException) -> bytes:
    import traceback

    trace = traceback.format_exc()
    try:
        packed = _packed(_ERROR, (error, trace))
        pickle.loads(packed)
    except Exception:
        return _packed(_ERROR, (RuntimeError(str(error)), trace))
    return packed


def _send(end: socket.socket, packed: bytes, descriptors: Sequence[int] = ()) -> None:
    socket.send_fds(end, [_LENGTH.pack(len(packed))], list(descriptors))
    end.sendall(packed)


def _receive(end: socket.socket) -> tuple[Any, list[int]]:
    """A message and its descriptors; `EOFError` if the other end is closed."""
    length, descriptors, _, _ = socket.recv_fds(end, _LENGTH.size, _MAX_DESCRIPTORS, socket.MSG_WAITALL)
    if len(length) < _LENGTH.size:
        raise EOFError
    packed = memoryview(bytearray(*_LENGTH.unpack(length)))
    position = 0
    while position < len(packed):
        count = end.recv_into(packed[position:])
        if not count:
            raise EOFError
        position += count
    return pickle.loads(packed), list(descriptors)
