"""Objects that show that a process is alive, and locks made of them.

An object store has no locks that end with their process. So a living process rewrites its objects
periodically. An object that was not rewritten for long, by the service's clock, is a dead process's.
For processes of this machine, no wait is needed. Exclusive locks use conditional writes:
create only if missing, replace only if unchanged.
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
from typing import Callable, Optional

from reshard.storage import temporary
from reshard.storage.locks import Waiting
from reshard.storage.s3.address import Address
from reshard.storage.s3.service import Service
from reshard.storage.store import Notify
from reshard.threads import renew_in_children

PUT_AGAIN_AFTER = 20.0
"""Seconds between rewrites of an object that shows life."""
DEAD_AFTER = 120.0
"""Seconds without a rewrite, by the service's clock, after which a process counts as dead."""

_HOLDER = re.compile(r"([0-9a-f]{8})-(\d+)-[0-9a-f]{12}")
_FREE = b"free"
# Additional seconds of waiting for a lock: the service measures the age of objects with another clock.
_OTHER_CLOCK = 15.0
# Each attempt takes two requests.
_MAX_PAUSE = 0.5
_TAKEN_FOR_DEAD = "another run removed this run's lock, because it was not renewed in time"
_NO_ETAG = '"00000000000000000000000000000000"'


def holder() -> str:
    """A unique name for a holder: machine, process, number."""
    return f"{_machine()}-{os.getpid()}-{os.urandom(6).hex()}"


def is_holder(name: str) -> bool:
    """Whether a name has the form of `holder`."""
    return _HOLDER.fullmatch(name) is not None


def is_alive(name: str, age: float) -> bool:
    """Whether the process of a holder's name is alive.

    Args:
        name: from `holder`.
        age: seconds since its object was last written.
    """
    match = _HOLDER.fullmatch(name)
    if match is None:
        return False
    if match[1] == _machine() and not _runs(match[2]):
        return False
    return age < DEAD_AFTER


def _runs(process: str) -> bool:
    """Whether a process of this machine runs; a killed one may stay listed until its parent collects it."""
    try:
        # Where /proc hides other users' processes (hidepid), this shows that one exists.
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # The program's name may contain any characters.
            return file.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except OSError:
        return True


class Lease:
    """An object that is rewritten while this process lives, until it is released.

    Args:
        service: the service.
        path: path of the object; a lock's is shared by all, any other is this process's own.
        content: beginning of its content.
        guarded: do not rewrite it after another process removed it as dead; see `check`.
        lock_etag: the version of a lock that this process has just taken; None for an object that is still missing.

    Attributes:
        path: path of the object.

    Raises:
        OSError: it cannot be written.
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
        _heartbeat.keep(self)

    def _put(self) -> None:
        if self._guarded:
            # Different content each time: the ETag changes.
            self._number += 1
            self._replace(self._content + b" %d" % self._number)
        else:
            now = _now()
            self._service.put(self.path, self._content)
            self._put_at = now

    def _replace(self, content: bytes) -> None:
        """Replace the version that this process wrote; a lock, or an object that another removed, may be lost."""
        if self._lost:
            return
        now = _now()
        condition = {"IfNoneMatch": "*"} if self._etag is None else {"IfMatch": self._etag}
        etag = put_if(self._service, self.path, content, **condition)
        if etag is None and self._etag is not None:
            # An earlier request may have succeeded although every answer was an error.
            with contextlib.suppress(FileNotFoundError):
                current = self._service.read(self.path)
                if current.content.startswith(self._content + b" "):
                    etag = put_if(self._service, self.path, content, IfMatch=current.etag)
        self._etag = etag
        self._lost = etag is None
        self._put_at = now

    def put_again(self) -> None:
        """Rewrite the object."""
        if not self._lock.acquire(blocking=False):
            # The thread that holds it rewrites the object itself, perhaps slowly.
            return
        try:
            with contextlib.suppress(Exception):
                if not self._released:
                    self._put()
        finally:
            self._lock.release()

    def check(self) -> None:
        """Raise if another process has removed this one's object while it was suspended.

        Raises:
            OSError: it has been removed, or its state is unknown.
        """
        with self._lock:
            if not self._lost and _now() - self._put_at > 2 * PUT_AGAIN_AFTER:
                self._put()
            if self._lost:
                raise OSError(errno.ENOLCK, _TAKEN_FOR_DEAD, self.path)

    def release(self) -> None:
        """Remove the object, if possible, or free the lock; it is not rewritten any more."""
        self._service.to_its_end(self._release, lambda _: None)

    def _release(self) -> None:
        _heartbeat.let_go(self)
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
        """Leave the object to expire; it is not rewritten any more."""
        _heartbeat.let_go(self)
        with self._lock:
            self._released = True


def waiting(service: Service, path: str, notify: Notify) -> Waiting:
    """A `Waiting` for the lock of an object."""

    def held_by() -> Optional[str]:
        try:
            return _owner(service.read(path).content)
        except OSError:
            return None

    hint = "its content begins with a digest of the machine and the holder's process id; end that process if it hangs"
    return Waiting(path, notify, hint, _MAX_PAUSE, _OTHER_CLOCK, held_by)


def remove_dead(service: Service, path: str, etag: str) -> None:
    """Delete the object of a dead process, if its version is unchanged.

    With conditional writes it is replaced first: a process that is alive after all, and rewrites it at this
    moment, either prevents that or fails in its next `Lease.check`.

    Raises:
        OSError: the service returned an unexpected answer.
    """
    if has_conditional_writes(service, path):
        put = put_if(service, path, b"dead " + os.urandom(6).hex().encode(), IfMatch=etag)
        if put is None:
            return
        etag = put
    delete_version(service, path, etag)


def delete_version(service: Service, path: str, etag: str) -> None:
    """Delete an object if its version is unchanged.

    Raises:
        OSError: the service returned an unexpected answer.
    """
    try:
        service.delete(path, etag)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise


@contextlib.contextmanager
def held_alone(service: Service, path: str, wait: Callable[[], None], notify: Notify) -> Iterator[Callable[[], None]]:
    """Hold a lock exclusively while the block runs; yields a check that raises `OSError` once the lock is lost.

    Args:
        service: the service.
        path: path of the lock's object.
        wait: called while another process holds it; pauses, and raises after the maximum time.
        notify: called if the service has no conditional writes; then no lock is held.

    Raises:
        OSError: the service returned an unexpected answer.
    """
    if not has_conditional_writes(service, path):
        notify(
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
    lease = Lease(service, path, name.encode(), guarded=True, lock_etag=etag)
    try:
        yield lease.check
    finally:
        lease.release()


def _owner(content: bytes) -> str:
    """The holder of a lock, from its content."""
    return content.split(b" ")[0].decode(errors="replace")


def _taken(service: Service, path: str, name: str) -> Optional[str]:
    """Take a lock that is free or a dead process's; its ETag, or None."""
    try:
        # Read first: after the first run the object always exists.
        current = service.read(path)
    except FileNotFoundError:
        return put_if(service, path, f"{name} 0".encode(), IfNoneMatch="*")
    if current.content != _FREE and is_alive(_owner(current.content), current.age):
        return None
    return put_if(service, path, f"{name} 0".encode(), IfMatch=current.etag)


def put_if(service: Service, path: str, content: bytes, **condition: str) -> Optional[str]:
    """Write a small object of unique content under a condition.

    Args:
        service: the service.
        path: path of the object.
        content: content of the object.
        condition: ``IfNoneMatch`` or ``IfMatch``.

    Returns:
        Its ETag; None if the condition fails.

    Raises:
        OSError: the service returned an unexpected answer, or does not support the condition.
    """
    try:
        etag = service.put(path, content, **condition).get("ETag")
        if etag:
            return str(etag)
    except FileNotFoundError:
        if "IfMatch" not in condition:
            # The bucket is missing.
            raise
        return None
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    # The write may have succeeded although its answer, or the ETag in it, was lost.
    with contextlib.suppress(FileNotFoundError):
        current = service.read(path)
        if current.content == content:
            return current.etag
    return None


_conditional: dict[tuple[str, str], bool] = {}


def knows_conditions(service: Service, path: str) -> bool:
    """Whether to send conditions with writes to a bucket: True unless the service was shown to lack them."""
    return _conditional.get((service.name, Address.parse(path).bucket), True)


def _refused(service: Service, path: str, **condition: str) -> bool:
    """Whether a service refuses a write whose condition fails."""
    try:
        service.put(path, b"", **condition)
    except OSError as error:
        if error.errno not in (errno.ESTALE, errno.ENOENT):
            raise
        return True
    return False


def _respects_conditions(service: Service, probe: str) -> bool:
    """Whether a service respects both conditions of writes, tried with an object that is deleted afterwards."""
    try:
        service.put(probe, b"")
        # One after the other: the deletion must be the last request.
        return _refused(service, probe, IfNoneMatch="*") and _refused(service, probe, IfMatch=_NO_ETAG)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return False
    finally:
        with contextlib.suppress(OSError):
            service.delete(probe)


def has_conditional_writes(service: Service, path: str) -> bool:
    """Whether a service respects conditions of writes: some ignore them, some reject them.

    Args:
        service: the service.
        path: an object; a test object is written next to it, once for each bucket.

    Raises:
        OSError: the service returned an unexpected answer.
    """
    bucket = Address.parse(path).bucket
    conditional = _conditional.get((service.name, bucket))
    if conditional is None:
        probe = f"{path}.{holder()}"
        # To its end: a request that outlives a signal could write the object again after its deletion.
        conditional = service.to_its_end(lambda: _respects_conditions(service, probe), lambda _: None)
        _conditional[service.name, bucket] = conditional
    return conditional


class _Heartbeat:
    """The leases of this process, and the thread that puts them again; a forked child begins with none.

    Attributes:
        leases: the leases.
    """

    def __init__(self) -> None:
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Leave the leases to the parent, whose thread does not run in a child."""
        self.leases: set[Lease] = set()
        self._lock = threading.Lock()
        self._begun = False

    def keep(self, one: Lease) -> None:
        """Put a lease again from now on."""
        with self._lock:
            self.leases.add(one)
            if not self._begun:
                threading.Thread(target=self._run, name="reshard-alive", daemon=True).start()
                self._begun = True

    def let_go(self, one: Lease) -> None:
        """Put a lease no more."""
        with self._lock:
            self.leases.discard(one)

    def _run(self) -> None:
        while True:
            time.sleep(PUT_AGAIN_AFTER)
            with self._lock:
                now = list(self.leases)
            for one in now:
                # Each in its own thread: the failure or delay of one does not stop the others.
                threading.Thread(target=one.put_again, name="reshard-alive", daemon=True).start()


_heartbeat = _Heartbeat()


def _now() -> float:
    """Seconds that also count while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@functools.cache
def _machine() -> str:
    """This machine since its start, and its PID namespace, in a few characters."""
    return hashlib.sha256(f"{temporary.machine()} {temporary.namespace()}".encode()).hexdigest()[:8]
