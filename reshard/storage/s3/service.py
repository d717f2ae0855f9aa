"""The service of objects: address, credentials, client, retries.

Credentials come from boto3's usual sources: environment, profile, role of the machine or container.
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
from typing import Any, Callable, Optional, TypeVar
from urllib.parse import urlsplit

from reshard.errors import InputError
from reshard.named_tuple import NamedTuple
from reshard.storage.registry import endpoint
from reshard.storage.s3 import failures
from reshard.storage.s3.address import Address
from reshard.storage.s3.failures import StrangeAnswer
from reshard.threads import ThreadLock, renew_in_children

T = TypeVar("T")
V = TypeVar("V")

# Connections: for reading threads, for sending threads, and for `Service.each`.
_CONNECTIONS = 192
# Concurrent requests for one object, or for statuses.
_AT_A_TIME = 64
_CONNECT_SECONDS = 10
# Seconds without a byte.
_READ_SECONDS = 20
_SMALL_OBJECT = 1 << 20
_SEND_BYTES = 128 << 10


class SmallObject(NamedTuple):
    """The content of a small object.

    Attributes:
        content: all its bytes.
        etag: the service's identifier of its version.
        age: seconds since its upload, by the service's clock.
    """

    content: bytes
    etag: str
    age: float


class Listed(NamedTuple):
    """An object in a list.

    Attributes:
        key: key of the object.
        size: bytes.
        age: seconds since its upload, by the service's clock.
        etag: the service's identifier of its version; empty if the list has none.
    """

    key: str
    size: int
    age: float
    etag: str


class Page(NamedTuple):
    """A page of a list.

    Attributes:
        objects: on this page.
        prefixes: beginnings of keys up to and with the next slash.
    """

    objects: list[Listed]
    prefixes: list[str]


def age_of(modified: datetime, answer: Any) -> float:
    """Seconds since an object's upload, by the service's clock; by this machine's if the answer has no date."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        now = parsedate_to_datetime(date)
    except (TypeError, ValueError):
        now = _now()
    # A date with the zone -0000 is parsed without a zone.
    return (now.replace(tzinfo=now.tzinfo or timezone.utc) - modified).total_seconds()


def _now() -> datetime:
    return datetime.now(timezone.utc)


def field(answer: Any, name: str, kind: type[T], path: str) -> T:
    """A required field of an answer.

    Raises:
        StrangeAnswer: it is missing.
    """
    value = answer.get(name)
    if not isinstance(value, kind):
        raise StrangeAnswer(path, f"{name} is missing" if value is None else f"{name} is {str(value)[:80]!r}")
    return value


class SentBytes:
    """Bytes as a file that is sent in blocks: each has its own timeout, and no block is copied."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, count: int = -1) -> memoryview:
        """The next bytes: more than requested if that is little."""
        end = len(self._data) if count < 0 else self._position + max(count, _SEND_BYTES)
        block = self._data[self._position : end]
        self._position += len(block)
        return block

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to an offset."""
        self._position = offset + (0, self._position, len(self._data))[whence]
        return self._position

    def tell(self) -> int:
        """The offset of the next byte."""
        return self._position


def service(path: str) -> Service:
    """The service, connected once.

    Args:
        path: the path that needs it, for messages.

    Raises:
        InputError: a package is missing, or the settings are wrong.
    """
    try:
        return _service(endpoint())
    except ImportError as error:
        raise InputError(
            f"{path}: is in an object store, which needs boto3; boto3 is not installed",
            file=path,
            hint="pip install 'reshard[s3]'; in the clone of reshard: pip install '.[s3]'",
        ) from error
    except ValueError as error:
        raise InputError(
            f"{path}: the object store cannot be used: {failures.one_line(str(error))}",
            file=path,
            hint="check --endpoint-url, or AWS_ENDPOINT_URL and the profile",
        ) from None
    except OSError as error:
        raise InputError(f"{path}: the object store cannot be used: {error.strerror}", file=path) from None


def _without_expect(params: dict[str, Any], **_: Any) -> None:
    params["headers"].pop("Expect", None)


@functools.cache
def _service(url: Optional[str]) -> Service:
    return Service(url)


def _without_user(url: str) -> str:
    """A URL without user and password: requests do not use them, messages would show them."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class Service:
    """A service and its client; for any number of threads.

    Args:
        url: its address; None for that of environment and profile.

    Attributes:
        name: unique name of the service.

    Raises:
        ImportError: a package is missing.
        ValueError: the settings are wrong.
        OSError: the profile is missing.
    """

    def __init__(self, url: Optional[str] = None) -> None:
        self._url = url
        self._connecting = ThreadLock()
        self._client, self._credentials = self._connect()
        self._clients_of_parents: list[Any] = []
        self.name: str = self._client.meta.endpoint_url
        # Before the first answer, the address may be wrong.
        self._answered = False
        # A request was given up for lack of an answer: later requests wait less.
        self._silent = False
        self._pool = ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="reshard-s3")
        renew_in_children(self)

    def renew(self) -> None:
        """Leave threads and connections to the parent: two readers of a connection get parts of each other's bytes."""
        # Not closed here: a thread that does not run in this process may hold its locks.
        self._clients_of_parents.append(self._client)
        self._client = None
        self._pool = ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="reshard-s3")

    @property
    def client(self) -> Any:
        """boto3's client, of this process alone."""
        with self._connecting:
            if self._client is None:
                self._client, self._credentials = self._connect()
            return self._client

    def _connect(self) -> tuple[Any, Any]:
        """A client and its credentials."""
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        settings: dict[str, Any] = {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "max_pool_connections": _CONNECTIONS,
            # Only `again` repeats failed requests.
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "user_agent_extra": "reshard",
        }
        # Most services other than Amazon's do not support checksums in trailers, boto3's default.
        settings.update(request_checksum_calculation="when_required", response_checksum_validation="when_required")
        # The digest of sent bytes is signed: damage in transit is refused, with HTTP, too.
        settings["s3"] = {"payload_signing_enabled": True}
        config = Config(**settings)
        try:
            session = boto3.session.Session()
            client = session.client("s3", endpoint_url=self._url and _without_user(self._url), config=config)
            if "@" in client.meta.endpoint_url:
                bare = _without_user(client.meta.endpoint_url)
                client = session.client("s3", endpoint_url=bare, config=config)
            # Content is sent at once: "Expect: 100-continue" costs another round trip.
            client.meta.events.register_last("before-call.s3", _without_expect)
            return client, session.get_credentials()
        except BotoCoreError as error:
            raise failures.error_of(error, "") from None

    @property
    def _secrets(self) -> list[str]:
        """Credentials that messages must not contain."""
        try:
            credentials = self._credentials.get_frozen_credentials()
        except Exception:
            # The request that needs them reports this.
            return []
        return [text for text in (credentials.access_key, credentials.secret_key, credentials.token) if text]

    def request(self, path: str, operation: str, **arguments: Any) -> Any:
        """The service's answer to a request about an object; failures that may pass are retried.

        Args:
            path: path of the object.
            operation: name of the client's method.
            arguments: its arguments, besides bucket and key of the path.

        Raises:
            OSError: the service refuses, or does not answer.
        """
        bucket, key = Address.parse(path)
        return self.bucket_request(path, operation, **{"Bucket": bucket, "Key": key, **arguments})

    def head(self, path: str) -> Optional[Any]:
        """The service's answer with size and metadata of an object; None if it is missing.

        Raises:
            OSError: as `request`.
        """
        try:
            return self.request(path, "head_object")
        except FileNotFoundError:
            return None

    def bucket_request(self, path: str, operation: str, **arguments: Any) -> Any:
        """As `request`, with all arguments given."""

        def call() -> Any:
            body = arguments.get("Body")
            if isinstance(body, SentBytes):
                body.seek(0)
            return getattr(self.client, operation)(**arguments)

        return self.again(path, call)

    def again(self, path: str, call: Callable[[], T], progress: Callable[[], int] = int) -> T:
        """The result of a call of boto3; failures that may pass are retried.

        Args:
            path: path that the request is about, for messages.
            call: makes the request.
            progress: bytes received so far: while they increase, retries continue without limit.

        Raises:
            OSError: the retries failed.
        """
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError

        # Errors of parsing an answer include ValueError.
        expected = (BotoCoreError, ClientError, ResponseParserError, HTTPError, ValueError, LookupError, TypeError)
        times = before = 0
        since = time.monotonic()
        while True:
            try:
                answer = call()
                self._answered, self._silent = True, False
                return answer
            except expected as error:
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
        """The content of a small object.

        Raises:
            OSError: as `request`, or it is not small.
        """
        bucket, key = Address.parse(path)

        def get() -> SmallObject:
            # Another program may have written a large object there.
            answer = self.client.get_object(Bucket=bucket, Key=key)
            if field(answer, "ContentLength", int, path) > _SMALL_OBJECT:
                answer["Body"].close()
                raise OSError(errno.EFBIG, "is larger than any such object", path)
            modified = field(answer, "LastModified", datetime, path)
            return SmallObject(answer["Body"].read(), field(answer, "ETag", str, path), age_of(modified, answer))

        return self.again(path, get)

    def put(self, path: str, content: bytes, **more: Any) -> Any:
        """Write a small object, replacing another; the answer.

        Args:
            path: path of the object.
            content: content of the object.
            more: arguments of ``put_object``.

        Raises:
            OSError: as `request`.
        """
        return self.request(path, "put_object", Body=content, **more)

    def delete(self, path: str, etag: str = "") -> None:
        """Delete an object if it exists.

        Args:
            path: path of the object.
            etag: delete only this version. Services without this condition ignore or refuse it.

        Raises:
            OSError: as `request`; `errno.ESTALE` for another version.
        """
        condition = {"IfMatch": etag} if etag else {}
        try:
            self.request(path, "delete_object", **condition)
        except OSError as error:
            if not etag or error.errno != errno.ENOTSUP:
                raise
            self.delete(path)

    def pages(self, path: str, prefix: str, delimiter: str = "/", most: Optional[int] = None) -> Iterator[Page]:
        """The objects of a bucket, page by page.

        Args:
            path: any path in the bucket; also for messages.
            prefix: beginning of the keys.
            delimiter: keys are listed up to the next delimiter after the prefix.
            most: maximum objects of a page; by default the service's.

        Raises:
            OSError: as `request`.
        """
        bucket = Address.parse(path).bucket
        arguments: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix, "Delimiter": delimiter}
        if most is not None:
            arguments["MaxKeys"] = most
        tokens: set[str] = set()
        while True:
            page = self.bucket_request(path, "list_objects_v2", **arguments)
            yield _page(page, prefix, path)
            if not page.get("IsTruncated"):
                return
            token = field(page, "NextContinuationToken", str, path)
            if token in tokens:
                raise StrangeAnswer(path, "a list whose pages repeat")
            tokens.add(token)
            arguments["ContinuationToken"] = token

    def named(self, directory: str, start: str = "") -> Iterator[tuple[str, Listed]]:
        """The objects in a directory, without subdirectories, and their names.

        Args:
            directory: the directory.
            start: only names that begin so.

        Raises:
            OSError: as `request`.
        """
        prefix = Address.parse(directory).prefix
        for page in self.pages(directory, prefix + start):
            for listed in page.objects:
                yield listed.key[len(prefix) :], listed

    def at_once(self, *calls: Callable[[], T]) -> list[T]:
        """The results of several calls, made concurrently; raises the first error.

        None of the calls may use this method.
        """
        return [future.result() for future in [self._pool.submit(call) for call in calls]]

    def each(self, call: Callable[[V], T], values: Sequence[V]) -> Iterator[T]:
        """The result of a call for each value, in order, several concurrently.

        The call may not use this method.
        """
        coming: deque[Future[T]] = deque()
        for value in values:
            coming.append(self._pool.submit(call, value))
            if len(coming) == _AT_A_TIME:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()

    def outside(self, call: Callable[[], T]) -> T:
        """The result of a call that ignores signals; they are handled while the main thread waits."""
        if threading.current_thread() is not threading.main_thread():
            return call()
        return self._pool.submit(call).result()

    def to_its_end(self, call: Callable[[], T], undo: Callable[[T], object]) -> T:
        """The result of a call that changes something, and that signals do not interrupt.

        Args:
            call: the call; neither it nor `undo` may use this method.
            undo: called with its result if a signal arrived in between.
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
