"""Objects that say that a process is alive, and locks made of them.

An object store knows no locks that end with their process. So a process that lives puts its objects again
from time to time; one that was not put again for long, by the service's own clock, is a dead process's. Of
processes of this machine it is known at once. A lock that one process holds alone takes conditional writes:
an object that is made only where there is none, and replaced only where it is still the one that was seen.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Callable, Optional, Protocol

from reshard.storage import temporary
from reshard.storage.locks import Waiting
from reshard.storage.s3.address import Address
from reshard.storage.s3.service import Service
from reshard.storage.store import Tell

PUT_AGAIN_AFTER = 20.0
"""Seconds after which an object that says that somebody lives is put again."""
DEAD_AFTER = 120.0
"""Seconds after which one that was not put again is a dead process's, as the service counts them."""

_HOLDER = re.compile(r"([0-9a-f]{8})-(\d+)-[0-9a-f]{12}")
_FREE = b"free"
# Seconds by which a lock is waited for longer: the service counts the silence of dead processes by another clock.
_OTHER_CLOCK = 15.0
# Each look costs two requests.
_MAX_PAUSE = 0.5
_TAKEN_FOR_DEAD = "another run has taken this one for dead, because it was silent for long"
_NO_ETAG = '"00000000000000000000000000000000"'


def holder() -> str:
    """A name that tells who holds something, and nothing else has: machine, process, number."""
    return f"{_machine()}-{os.getpid()}-{os.urandom(6).hex()}"


def is_holder(name: str) -> bool:
    """Whether a name is one of `holder`."""
    return _HOLDER.fullmatch(name) is not None


def is_alive(name: str, age: float) -> bool:
    """Whether whoever has a name lives.

    Args:
        name: of `holder`.
        age: seconds since its object was put the last time.
    """
    match = _HOLDER.fullmatch(name)
    if match is None:
        return False
    if match[1] == _machine() and not _runs(match[2]):
        return False
    return age < DEAD_AFTER


def _runs(process: str) -> bool:
    """Whether a process of this machine runs; one that was killed may stay listed until its parent asks for it."""
    try:
        # Where /proc hides the processes of other users (hidepid), this tells that there is one.
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # What it is called may hold anything.
            return file.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except OSError:
        return True


class Lease:
    """An object that is put again while this process lives, until it is released.

    Args:
        service: where.
        path: of the object; a lock's is everybody's, any other this process's own.
        content: what its content begins with.
        guarded: never put again what another process has removed, because it took this one for dead; see `check`.
        lock_etag: the version of a lock that this process has just taken; None for an object that is not there yet.

    Attributes:
        path: of the object.

    Raises:
        OSError: it cannot be put.
    """

    def __init__(
        self, service: Service, path: str, content: bytes = b"", guarded: bool = False, lock_etag: Optional[str] = None
    ) -> None:
        self._service = service
        self.path = path
        self._content = content
        self._guarded = guarded
        self._is_lock = lock_etag is not None
        self._lock = threading.Lock()
        self._etag = lock_etag
        self._number = 0
        self._lost = False
        self._released = False
        self._put_at = _now()
        if not self._is_lock:
            service.to_its_end(self._put, lambda _: self._release())
        _keep_alive(self)

    def _put(self) -> None:
        if self._guarded:
            # Another content each time, so that it has another ETag.
            self._number += 1
            self._replace(self._content + b" %d" % self._number)
        else:
            now = _now()
            self._service.put(self.path, self._content)
            self._put_at = now

    def _replace(self, content: bytes) -> None:
        """Put it in place of the version that this process put; a lock, or what another removed, may be lost."""
        if self._lost:
            return
        now = _now()
        condition = {"IfNoneMatch": "*"} if self._etag is None else {"IfMatch": self._etag}
        found = put_if(self._service, self.path, content, **condition)
        if found is None and self._etag is not None:
            # Where an earlier request was heeded though every answer was an error, it is still this process's.
            with contextlib.suppress(FileNotFoundError):
                there = self._service.read(self.path)
                if there.content.startswith(self._content + b" "):
                    found = put_if(self._service, self.path, content, IfMatch=there.etag)
        self._etag = found
        self._lost = found is None
        self._put_at = now

    def put_again(self) -> None:
        """Say again that this process lives."""
        with _unless_busy(self._lock) as idle, contextlib.suppress(OSError):
            if idle and not self._released:
                self._put()

    def check(self) -> None:
        """Insist that no other process has taken this one for dead while it was suspended.

        Raises:
            OSError: one has, or nobody can tell.
        """
        with self._lock:
            if not self._lost and _now() - self._put_at > 2 * PUT_AGAIN_AFTER:
                self._put()
            if self._lost:
                raise OSError(errno.ENOLCK, _TAKEN_FOR_DEAD, self.path)

    def release(self) -> None:
        """Remove the object, as far as possible, or let another process have the lock; it is not put again."""
        self._service.to_its_end(self._release, lambda _: None)

    def _release(self) -> None:
        _let_go(self)
        with self._lock:
            if self._released:
                return
            self._released = True
            with contextlib.suppress(OSError):
                if self._is_lock:
                    self._replace(_FREE)
                else:
                    self._service.delete(self.path)
            self._lost = True

    def abandon(self) -> None:
        """Let the object lie, which is a dead process's when it has lain long enough; it is not put again."""
        _let_go(self)
        with self._lock:
            self._released = True


def waiting(service: Service, path: str, tell: Tell) -> Waiting:
    """Waits for the lock of an object."""

    def held_by() -> Optional[str]:
        try:
            return _owner(service.read(path).content)
        except OSError:
            return None

    hint = "its content begins with a digest of the machine and the process that has it; end that if it hangs"
    return Waiting(path, tell, hint, _MAX_PAUSE, _OTHER_CLOCK, held_by)


def remove_dead(service: Service, path: str, etag: str) -> None:
    """Delete the object of a process that was taken for dead, if it is still the version that was looked at.

    Where the service has conditional writes it is replaced first: whoever lives after all, and puts it again at this
    moment, is seen by that, or learns from its next `Lease.check` that it was taken for dead.

    Raises:
        OSError: the service does not answer as it should.
    """
    if has_conditional_writes(service, path):
        put = put_if(service, path, b"dead " + os.urandom(6).hex().encode(), IfMatch=etag)
        if put is None:
            return
        etag = put
    delete_version(service, path, etag)


def delete_version(service: Service, path: str, etag: str) -> None:
    """Delete an object, unless it is another version by now.

    Raises:
        OSError: the service does not answer as it should.
    """
    try:
        service.delete(path, etag)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise


@contextlib.contextmanager
def held_alone(service: Service, path: str, wait: Callable[[], None], tell: Tell) -> Iterator[Callable[[], None]]:
    """Hold a lock alone while the block runs; what it is given insists that it is still held, or raises `OSError`.

    Args:
        service: where.
        path: of the lock's object.
        wait: called while another has it; waits a moment, and raises when it has been long enough.
        tell: told if the service has no conditional writes; then nothing is held.

    Raises:
        OSError: the service does not answer as it should.
    """
    if not has_conditional_writes(service, path):
        tell(
            f"{service.name} has no conditional writes, by which runs see each other: "
            f"let no other run write to {path.rpartition('/.reshard/')[0]} at the same time"
        )
        yield lambda: None
        return
    name = holder()
    while True:
        etag = service.to_its_end(
            lambda: _taken(service, path, name),
            lambda etag: Lease(service, path, name.encode(), True, etag)._release() if etag is not None else None,
        )
        if etag is not None:
            break
        wait()
    held = Lease(service, path, name.encode(), guarded=True, lock_etag=etag)
    try:
        yield held.check
    finally:
        held.release()


def _owner(content: bytes) -> str:
    """Who holds a lock, by its content."""
    return content.split(b" ")[0].decode(errors="replace")


def _taken(service: Service, path: str, name: str) -> Optional[str]:
    """Have a lock that is nobody's, free, or a dead process's; its ETag, or None."""
    try:
        # Looked at first: it is there from the first time on.
        found = service.read(path)
    except FileNotFoundError:
        return put_if(service, path, f"{name} 0".encode(), IfNoneMatch="*")
    if found.content != _FREE and is_alive(_owner(found.content), found.age):
        return None
    return put_if(service, path, f"{name} 0".encode(), IfMatch=found.etag)


def put_if(service: Service, path: str, content: bytes, **condition: str) -> Optional[str]:
    """Put a small object of a content that no other has, under a condition.

    Args:
        service: where.
        path: of the object.
        content: of the object.
        condition: ``IfNoneMatch`` or ``IfMatch``.

    Returns:
        Its ETag; None where the condition does not hold.

    Raises:
        OSError: the service does not answer as it should, or has no such condition.
    """
    bucket, key = Address.parse(path)
    try:
        etag = service.ask(path, "put_object", Bucket=bucket, Key=key, Body=content, **condition).get("ETag")
        if etag:
            return str(etag)
    except FileNotFoundError:
        if "IfMatch" not in condition:
            # There is no such bucket.
            raise
        return None
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    # It may have been put by this, and the answer, or the ETag in it, lost.
    with contextlib.suppress(FileNotFoundError):
        found = service.read(path)
        if found.content == content:
            return found.etag
    return None


_known: dict[tuple[str, str], bool] = {}


def knows_conditions(service: Service, path: str) -> bool:
    """Whether conditions of writes to a bucket are worth sending: unless it was found that the service has none."""
    return _known.get((service.name, Address.parse(path).bucket), True)


def _refused(service: Service, path: str, **condition: str) -> bool:
    """Whether a service refuses to put an object under a condition that does not hold."""
    bucket, key = Address.parse(path)
    try:
        service.ask(path, "put_object", Bucket=bucket, Key=key, Body=b"", **condition)
    except OSError as error:
        if error.errno not in (errno.ESTALE, errno.ENOENT):
            raise
        return True
    return False


def has_conditional_writes(service: Service, path: str) -> bool:
    """Whether a service heeds conditions of writes: some pass over them, some refuse them.

    Args:
        service: which.
        path: an object beside which another may be put to find out, which is done once for each bucket.

    Raises:
        OSError: the service does not answer as it should.
    """
    bucket = Address.parse(path).bucket
    found = _known.get((service.name, bucket))
    if found is None:
        probe = f"{path}.{holder()}"
        try:
            service.put(probe, b"")
            found = all(
                service.at_once(
                    lambda: _refused(service, probe, IfNoneMatch="*"),
                    lambda: _refused(service, probe, IfMatch=_NO_ETAG),
                )
            )
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            found = False
        finally:
            with contextlib.suppress(OSError):
                service.delete(probe)
        _known[service.name, bucket] = found
    return found


class _Alive(Protocol):
    def put_again(self) -> None: ...


_alive: set[_Alive] = set()
_alive_lock = threading.Lock()
_thread: Optional[threading.Thread] = None


def _keep_alive(one: _Alive) -> None:
    global _thread
    with _alive_lock:
        _alive.add(one)
        if _thread is None:
            _thread = threading.Thread(target=_put_again, name="reshard-alive", daemon=True)
            _thread.start()


def _let_go(one: _Alive) -> None:
    with _alive_lock:
        _alive.discard(one)


def _put_again() -> None:
    while True:
        time.sleep(PUT_AGAIN_AFTER)
        with _alive_lock:
            now = list(_alive)
        for one in now:
            # Each by itself: whatever goes wrong with one, or takes long, the others live.
            threading.Thread(target=_put_one, args=(one,), name="reshard-alive", daemon=True).start()


def _put_one(one: _Alive) -> None:
    with contextlib.suppress(Exception):
        one.put_again()


@contextlib.contextmanager
def _unless_busy(lock: threading.Lock) -> Iterator[bool]:
    """Hold a lock while the block runs, if nobody has it: who has it puts the object by itself, perhaps for long."""
    idle = lock.acquire(blocking=False)
    try:
        yield idle
    finally:
        if idle:
            lock.release()


def _now() -> float:
    """Seconds, which pass as well while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@functools.cache
def _machine() -> str:
    """This machine, since it was started, and the processes that can be seen, in a few characters."""
    return hashlib.sha256(f"{temporary.machine()} {temporary.namespace()}".encode()).hexdigest()[:8]
