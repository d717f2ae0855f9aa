"""The records of a conversion in its target directory.

``DST/.reshard/<digest of the identity>/`` holds ``plan.json`` (the identity), ``lock`` (held by every
run that is writing), and empty files whose *names* are the records: one per finished target in
``done/``, one per source file that a run has read in ``sources/``. An empty file is made in one step
on every file system, so a record is there whole or not at all, two machines cannot tear each other's,
and one listing tells everything.

A new target is recorded after its bytes are on disk under the temporary name and before it gets its
final one, so no finished target is ever without a record. A record without its target, or with one
of another size or time, counts for nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, Optional

from reshard import temporary
from reshard.errors import RetryableError, TargetError
from reshard.records.identity import Identity, SourceFile
from reshard.wording import rank_ranges

DIRECTORY = ".reshard"

_SECOND = 10**9
_NONE = "none"


class DoneRecord(NamedTuple):
    """A finished target.

    Attributes:
        rank: target rank.
        size: bytes of its file.
        modified: time of its last change, in nanoseconds.
        headers: digest of all of its bytes that are not tensor contents; None for a file taken over.
        crc: CRC-32 of the whole file, or None.
    """

    rank: int
    size: int
    modified: int
    headers: Optional[str]
    crc: Optional[int]

    def matches(self, path: str) -> bool:
        """Whether the file is there as it was written."""
        try:
            status = os.stat(path)
        except OSError:
            return False
        return status.st_size == self.size and _same_time(status.st_mtime_ns, self.modified)


class Ledger:
    """The records of one conversion.

    Args:
        destination: the target directory.
        identity: which conversion.
    """

    def __init__(self, destination: str, identity: Identity) -> None:
        self.identity = identity
        self._root = os.path.join(destination, DIRECTORY)
        self._own = os.path.join(self._root, identity.digest)
        self._lock: Optional[int] = None

    @property
    def exists(self) -> bool:
        """Whether some run of this conversion has begun."""
        return os.path.isfile(os.path.join(self._own, "plan.json"))

    def others(self) -> list[Identity]:
        """Other conversions that have begun in the same directory."""
        return [found for found in begun_in(os.path.dirname(self._root)) if found != self.identity]

    @property
    def in_use(self) -> bool:
        """Whether some run is writing at this moment, as far as locks tell."""
        with _locked_alone(os.path.join(self._own, "lock")) as free:
            return not free

    def begin(self, take_over: bool) -> None:
        """Say that this conversion is writing here, until `end`.

        Records of runs that were killed before they had finished anything are forgotten.

        Args:
            take_over: forget other conversions, whose targets are gone or will all be replaced.

        Raises:
            TargetError: another conversion is writing here.
            RetryableError: the directory cannot be written.
        """
        try:
            if take_over:
                self._forget_others()
            if not self.done():
                with _locked_alone(os.path.join(self._own, "lock")) as free:
                    if free:
                        shutil.rmtree(self._own, ignore_errors=True)
            self._lock = self._lock_shared()
            path = os.path.join(self._own, "plan.json")
            temporary.remove_dead(self._own)
            if not os.path.exists(path):
                temporary.write_whole(path, (self.identity.to_json() + "\n").encode())
        except OSError as error:
            raise _unwritable(self._root, error) from error
        # Two that begin at the same moment see each other here.
        others = self.others()
        if others:
            self.end()
            raise another_conversion(os.path.dirname(self._root), self.identity, others)

    def end(self) -> None:
        """This run writes no more. Records of nothing are removed, unless another run is writing."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError):
            if not self.done() and _flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(self._own)
                os.rmdir(self._root)
                os.rmdir(os.path.dirname(self._root))
        os.close(self._lock)
        self._lock = None

    def check_sources(self, sources: Iterable[SourceFile]) -> list[int]:
        """Compare source files with what earlier runs of this conversion read.

        Returns:
            Ranks whose files have another time than before, though the same size and headers.

        Raises:
            TargetError: a file has another size or other headers.
        """
        before: dict[int, list[SourceFile]] = {}
        for name in _listed(os.path.join(self._own, "sources")):
            with contextlib.suppress(ValueError):
                rank, size, headers, modified = name.split(".")
                before.setdefault(int(rank), []).append(SourceFile(int(rank), int(size), headers, int(modified)))
        touched, changed = [], []
        for source in sources:
            known = before.get(source.rank, [])
            if any((one.size, one.headers) != (source.size, source.headers) for one in known):
                changed.append(source.rank)
            elif known and not any(_same_time(source.modified, one.modified) for one in known):
                touched.append(source.rank)
        if changed:
            raise TargetError(
                f"the source files of {rank_ranges(changed)} have changed since the conversion in "
                f"{os.path.dirname(self._root)} was begun",
                file=os.path.dirname(self._root),
                rank=changed[0],
                hint="choose another DST, or convert everything again with --overwrite",
            )
        return touched

    def add_sources(self, sources: Iterable[SourceFile]) -> None:
        """Remember source files."""
        known = set(_listed(os.path.join(self._own, "sources")))
        for source in sources:
            self._mark("sources", ".".join(map(str, source)), known)

    def forget_sources(self) -> None:
        """Everything is made anew, perhaps of other files."""
        for name in _listed(os.path.join(self._own, "sources")):
            _remove(os.path.join(self._own, "sources", name))

    def done(self, ranks: Optional[Collection[int]] = None) -> dict[int, list[DoneRecord]]:
        """Records of finished targets, by rank; several where several runs have made the same."""
        found: dict[int, list[DoneRecord]] = {}
        for name in _listed(os.path.join(self._own, "done")):
            record = _parsed(name)
            if record is not None and (ranks is None or record.rank in ranks):
                found.setdefault(record.rank, []).append(record)
        return found

    def record(self, record: DoneRecord) -> None:
        """Remember that a target is finished.

        Raises:
            RetryableError: it cannot be written down.
        """
        crc = _NONE if record.crc is None else f"{record.crc:08x}"
        headers = _NONE if record.headers is None else record.headers
        self._mark("done", f"{record.rank}.{record.size}.{record.modified}.{headers}.{crc}", ())

    def forget(self, ranks: Collection[int]) -> None:
        """Forget that targets are finished, because they are to be made again."""
        chosen = set(ranks)
        for name in _listed(os.path.join(self._own, "done")):
            record = _parsed(name)
            if record is None or record.rank in chosen:
                _remove(os.path.join(self._own, "done", name))

    def replacing(self, ranks: Collection[int]) -> bool:
        """Whether a run that replaces existing targets of these ranks was begun and has not ended."""
        return os.path.exists(self._replacing(ranks))

    def begin_replacing(self, ranks: Collection[int]) -> None:
        """Remember that all targets of these ranks are to be made again, until `end_replacing`."""
        self.forget(ranks)
        self._mark("", os.path.basename(self._replacing(ranks)), ())

    def end_replacing(self, ranks: Collection[int]) -> None:
        """All of them have been made."""
        _remove(self._replacing(ranks))

    def _lock_shared(self) -> int:
        path = os.path.join(self._own, "lock")
        while True:
            for name in ("done", "sources"):
                os.makedirs(os.path.join(self._own, name), exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                _flock(fd, fcntl.LOCK_SH)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(path), os.fstat(fd)):
                        return fd
                # Removed by a run that ended between opening and locking it.
                os.close(fd)

    def _replacing(self, ranks: Collection[int]) -> str:
        digest = hashlib.sha256(repr(sorted(ranks)).encode()).hexdigest()[:16]
        return os.path.join(self._own, f"replacing.{digest}")

    def _mark(self, directory: str, name: str, known: Collection[str]) -> None:
        if name not in known:
            path = os.path.join(self._own, directory, name)
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
            except OSError as error:
                raise _unwritable(path, error) from error

    def _forget_others(self) -> None:
        for name in _listed(self._root):
            if name == self.identity.digest:
                continue
            with _locked_alone(os.path.join(self._root, name, "lock")) as free:
                if not free:
                    raise TargetError(
                        f"another conversion is being written to {os.path.dirname(self._root)} at this moment",
                        file=os.path.dirname(self._root),
                        hint="wait until it has ended, or choose another DST",
                    )
                shutil.rmtree(os.path.join(self._root, name), ignore_errors=True)


def begun_in(destination: str) -> list[Identity]:
    """The conversions that have begun in a directory; one, unless something went wrong.

    Raises:
        RetryableError: the records cannot be read.
    """
    root = os.path.join(destination, DIRECTORY)
    found = []
    for name in _listed(root):
        try:
            with open(os.path.join(root, name, "plan.json"), encoding="utf-8") as file:
                found.append(Identity.from_json(file.read()))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            # Killed before it said what it is: nothing was written by it.
            continue
        except OSError as error:
            raise RetryableError(f"{root}: cannot be read: {error.strerror or error}", file=root) from error
    return found


def another_conversion(destination: str, mine: Identity, others: list[Identity]) -> TargetError:
    """The error for a directory that another conversion was begun in."""
    differs = ", ".join(mine.differences(others[0])) or "its records are not ours"
    return TargetError(
        f"{destination} holds another conversion, which differs in {differs}",
        file=destination,
        hint="choose another DST, give the command that was given before, or replace all of it with --overwrite",
    )


@contextlib.contextmanager
def _locked_alone(path: str) -> Iterator[bool]:
    """Hold a lock that no living run holds; False where one does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


def _flock(fd: int, operation: int) -> bool:
    """Lock an open file; False where somebody else has it. A file system without locks has none to lose."""
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _same_time(found: int, recorded: int) -> bool:
    """Whether a file's time is the recorded one; some file systems keep whole seconds only."""
    return found == recorded or found == recorded // _SECOND * _SECOND


def _parsed(name: str) -> Optional[DoneRecord]:
    try:
        rank, size, modified, headers, crc = name.split(".")
        digest, checksum = None if headers == _NONE else headers, None if crc == _NONE else int(crc, 16)
        return DoneRecord(int(rank), int(size), int(modified), digest, checksum)
    except ValueError:
        return None


def _listed(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RetryableError(f"{directory}: cannot be read: {error.strerror}", file=directory) from error


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str, error: OSError) -> RetryableError:
    return RetryableError(f"{path}: cannot be written: {error.strerror or error}", file=path)
