"""The service that is asked for objects: its address, the credentials, the client, and repeating what fails.

Credentials come from where boto3 finds them: the environment, a profile, the role of the machine or container.
"""

from __future__ import annotations

import errno
import functools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Callable, NamedTuple, Optional, TypeVar
from urllib.parse import urlsplit

from reshard.errors import InputError
from reshard.storage.registry import endpoint
from reshard.storage.s3 import failures
from reshard.storage.s3.address import Address
from reshard.storage.s3.failures import StrangeAnswer

T = TypeVar("T")
V = TypeVar("V")

# Connections: of the threads that read, of those that send parts, and of `Service.each`.
_CONNECTIONS = 192
# Requests under way for what is read of one object, or looked at.
_AT_A_TIME = 64
_CONNECT_SECONDS = 10
# Without a byte.
_READ_SECONDS = 20
_SMALL_OBJECT = 1 << 20
_SEND_BYTES = 128 << 10


class SmallObject(NamedTuple):
    """An object that was read whole.

    Attributes:
        content: of the object.
        etag: the service's mark of its version.
        age: seconds since it was put, by the service's clock.
    """

    content: bytes
    etag: str
    age: float


class Listed(NamedTuple):
    """An object in a list.

    Attributes:
        key: of the object.
        size: bytes.
        age: seconds since it was put, by the service's clock.
        etag: the service's mark of its version; empty where the list has none.
    """

    key: str
    size: int
    age: float
    etag: str


class Page(NamedTuple):
    """A page of a list.

    Attributes:
        objects: on this page.
        prefixes: beginnings of keys up to the next slash, with the slash.
    """

    objects: list[Listed]
    prefixes: list[str]


def age_of(modified: datetime, answer: Any) -> float:
    """Seconds since an object was put, by the clock of the service; by this machine's where the answer has no date."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        now = parsedate_to_datetime(date)
    except (TypeError, ValueError):
        now = _now()
    # A date with the zone -0000 comes without a zone.
    return (now.replace(tzinfo=now.tzinfo or timezone.utc) - modified).total_seconds()


def _now() -> datetime:
    return datetime.now(timezone.utc)


def field(answer: Any, name: str, kind: type[T], path: str) -> T:
    """A field that an answer has to have.

    Raises:
        StrangeAnswer: it has none.
    """
    value = answer.get(name)
    if not isinstance(value, kind):
        raise StrangeAnswer(path, f"{name} is missing" if value is None else f"{name} is {str(value)[:80]!r}")
    return value


class SentBytes:
    """Bytes as a file that is sent in blocks: each has its own timeout, and none is copied."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, count: int = -1) -> memoryview:
        """The next bytes: more than asked for, where little is."""
        end = len(self._data) if count < 0 else self._position + max(count, _SEND_BYTES)
        found = self._data[self._position : end]
        self._position += len(found)
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to an offset."""
        self._position = offset + (0, self._position, len(self._data))[whence]
        return self._position

    def tell(self) -> int:
        """The offset of the next byte."""
        return self._position


def service(path: str) -> Service:
    """The service that is asked, connected once.

    Args:
        path: what it is wanted for, for messages.

    Raises:
        InputError: a package is missing, or the settings are wrong.
    """
    try:
        return _service(endpoint())
    except ImportError as error:
        raise InputError(
            f"{path}: lies in an object store; to reach it takes boto3, which is not installed",
            file=path,
            hint="pip install 'reshard[s3]'; in the clone of reshard: pip install '.[s3]'",
        ) from error
    except ValueError as error:
        raise InputError(
            f"{path}: the object store cannot be asked: {failures.one_line(str(error))}",
            file=path,
            hint="check --endpoint-url, or AWS_ENDPOINT_URL and the profile",
        ) from None
    except OSError as error:
        raise InputError(f"{path}: the object store cannot be asked: {error.strerror}", file=path) from None


def _do_not_ask_first(params: dict[str, Any], **_: Any) -> None:
    params["headers"].pop("Expect", None)


@functools.cache
def _service(url: Optional[str]) -> Service:
    return Service(url)


def _without_user(url: str) -> str:
    """A URL without user and password, which no request uses and messages would show."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class Service:
    """A service and the client that asks it; for any number of threads.

    Args:
        url: its address; None for that of environment and profile.

    Attributes:
        client: boto3's.
        name: tells it from others.

    Raises:
        ImportError: a package is missing.
        ValueError: the settings are wrong.
        OSError: the profile is missing.
    """

    def __init__(self, url: Optional[str] = None) -> None:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        settings: dict[str, Any] = {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "max_pool_connections": _CONNECTIONS,
            # `again` is the one place that repeats what failed.
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "user_agent_extra": "reshard",
        }
        # Checksums in trailers, which are sent unasked, are known to few services but Amazon's.
        settings.update(request_checksum_calculation="when_required", response_checksum_validation="when_required")
        # A digest of what is sent is signed: what goes wrong on the way is refused, whatever protocol is spoken.
        settings["s3"] = {"payload_signing_enabled": True}
        config = Config(**settings)
        try:
            session = boto3.session.Session()
            self.client: Any = session.client("s3", endpoint_url=url and _without_user(url), config=config)
            if "@" in self.client.meta.endpoint_url:
                bare = _without_user(self.client.meta.endpoint_url)
                self.client = session.client("s3", endpoint_url=bare, config=config)
            # What is put is sent along at once: to ask first whether it may be costs a round trip more each time.
            self.client.meta.events.register_last("before-call.s3", _do_not_ask_first)
            self._credentials = session.get_credentials()
        except BotoCoreError as error:
            raise failures.error_of(error, "") from None
        self.name: str = self.client.meta.endpoint_url
        # Without an answer so far, its address may be wrong.
        self._answered = False
        # It answered nothing for so long that a request was given up: others are not as patient.
        self._silent = False
        self._pool = ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="reshard-s3")

    @property
    def _secrets(self) -> list[str]:
        """What no message may show."""
        try:
            found = self._credentials.get_frozen_credentials()
        except Exception:
            # Reported by the request that needs them.
            return []
        return [text for text in (found.access_key, found.secret_key, found.token) if text]

    def ask(self, path: str, operation: str, **wanted: Any) -> Any:
        """The service's answer to a request, which is repeated where it fails in a way that may pass.

        Args:
            path: what it is about, for messages.
            operation: name of the client's method.
            wanted: its arguments.

        Raises:
            OSError: it refuses, or does not answer.
        """

        def call() -> Any:
            body = wanted.get("Body")
            if isinstance(body, SentBytes):
                body.seek(0)
            return getattr(self.client, operation)(**wanted)

        return self.again(path, call)

    def again(self, path: str, call: Callable[[], T], progress: Callable[[], int] = int) -> T:
        """What a call of boto3 returns, which is repeated where it fails in a way that may pass.

        Args:
            path: what it is about, for messages.
            call: makes the request.
            progress: bytes that came so far: while there are more, it is repeated for ever.

        Raises:
            OSError: it goes on to fail.
        """
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        times = before = 0
        since = time.monotonic()
        while True:
            try:
                found = call()
                self._answered, self._silent = True, False
                return found
            # What cannot be parsed may be a ValueError and such.
            except (BotoCoreError, ClientError, ResponseParserError, ValueError, LookupError, TypeError) as error:
                if progress() > before:
                    times, before, since = 0, progress(), time.monotonic()
                times += 1
                late = time.monotonic() - since > failures.PATIENCE
                self._silent = self._silent or late
                if (
                    times == failures.MAX_TRIES
                    or late
                    or (self._silent and not before)
                    or not failures.may_pass(error, self._answered)
                ):
                    raise failures.error_of(error, path, self._secrets) from None
            time.sleep(failures.pause(times))

    def read(self, path: str) -> SmallObject:
        """A small object.

        Raises:
            OSError: as `ask`, or it is not small.
        """
        bucket, key = Address.parse(path)

        def get() -> SmallObject:
            # Anybody may have put anything there: no more than this is taken.
            found = self.client.get_object(Bucket=bucket, Key=key)
            if field(found, "ContentLength", int, path) > _SMALL_OBJECT:
                found["Body"].close()
                raise OSError(errno.EFBIG, "is larger than any such object", path)
            modified = field(found, "LastModified", datetime, path)
            return SmallObject(found["Body"].read(), field(found, "ETag", str, path), age_of(modified, found))

        return self.again(path, get)

    def put(self, path: str, content: bytes, **more: Any) -> Any:
        """Put a small object in place of another; the answer.

        Args:
            path: of the object.
            content: of the object.
            more: arguments of ``put_object``.

        Raises:
            OSError: as `ask`.
        """
        bucket, key = Address.parse(path)
        return self.ask(path, "put_object", Bucket=bucket, Key=key, Body=content, **more)

    def delete(self, path: str, etag: str = "") -> None:
        """Delete an object; nothing where there is none.

        Args:
            path: of the object.
            etag: delete this version alone. Services that know no such condition pass over it, or refuse it.

        Raises:
            OSError: as `ask`; `errno.ESTALE` for another version.
        """
        bucket, key = Address.parse(path)
        condition = {"IfMatch": etag} if etag else {}
        try:
            self.ask(path, "delete_object", Bucket=bucket, Key=key, **condition)
        except OSError as error:
            if not etag or error.errno != errno.ENOTSUP:
                raise
            self.delete(path)

    def pages(self, path: str, prefix: str, delimiter: str = "/", most: Optional[int] = None) -> Iterator[Page]:
        """A list of the objects of a bucket, page by page.

        Args:
            path: of anything in the bucket, for messages too.
            prefix: of the keys.
            delimiter: keys are listed up to the next one behind the prefix.
            most: objects of a page, if not as many as the service gives.

        Raises:
            OSError: as `ask`.
        """
        bucket = Address.parse(path).bucket
        wanted: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix, "Delimiter": delimiter}
        if most is not None:
            wanted["MaxKeys"] = most
        tokens: set[str] = set()
        while True:
            page = self.ask(path, "list_objects_v2", **wanted)
            yield _page(page, prefix, path)
            if not page.get("IsTruncated"):
                return
            token = field(page, "NextContinuationToken", str, path)
            if token in tokens:
                raise StrangeAnswer(path, "a list whose pages repeat")
            tokens.add(token)
            wanted["ContinuationToken"] = token

    def at_once(self, *calls: Callable[[], T]) -> list[T]:
        """What several calls return, made at the same time; the first error that one raises.

        None of them may use this method.
        """
        return [future.result() for future in [self._pool.submit(call) for call in calls]]

    def each(self, call: Callable[[V], T], values: Sequence[V]) -> Iterator[T]:
        """What a call returns for each of some values, in their order, made for several at the same time.

        It may not use this method.
        """
        coming: deque[Future[T]] = deque()
        for value in values:
            coming.append(self._pool.submit(call, value))
            if len(coming) == _AT_A_TIME:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()

    def outside(self, call: Callable[[], T]) -> T:
        """What a call returns that does not heed signals, which are still handled while the main thread waits."""
        if threading.current_thread() is not threading.main_thread():
            return call()
        return self._pool.submit(call).result()

    def to_its_end(self, call: Callable[[], T], undo: Callable[[T], object]) -> T:
        """What a call returns that changes something, and that no signal leaves half done.

        Args:
            call: neither it nor `undo` may use this method.
            undo: called for what it returned, where a signal was raised meanwhile.
        """
        if threading.current_thread() is not threading.main_thread():
            return call()
        future = self._pool.submit(call)
        try:
            return future.result()
        except BaseException:
            if future.exception() is None:
                undo(future.result())
            raise


def _page(answer: Any, prefix: str, path: str) -> Page:
    objects = []
    for entry in answer.get("Contents", ()):
        modified = field(entry, "LastModified", datetime, path)
        key, size = field(entry, "Key", str, path), field(entry, "Size", int, path)
        objects.append(Listed(key, size, age_of(modified, answer), entry.get("ETag") or ""))
    prefixes = [field(entry, "Prefix", str, path) for entry in answer.get("CommonPrefixes", ())]
    for key in (*(entry.key for entry in objects), *prefixes):
        if not key.startswith(prefix):
            raise StrangeAnswer(path, f"a list of {prefix!r} that contains {key[:80]!r}")
    return Page(objects, prefixes)
