"""The service that objects are asked of: where it is, who asks, and the clients that ask it.

Credentials come from where boto3 finds them: the environment, a profile, the role of the machine or container.
They are handed to obstore as they are needed, and to nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Callable, NamedTuple, Optional, TypeVar

from reshard.errors import InputError
from reshard.storage.s3 import failures
from reshard.storage.s3.address import Address
from reshard.storage.store import endpoint

T = TypeVar("T")
V = TypeVar("V")

# Connections of each client; as many as threads ever wait for storage.
_CONNECTIONS = 64
# Requests under way for what is read of one object, or looked at.
_AT_A_TIME = 64
_CONNECT_SECONDS = 10
# Without a byte, or for a whole request of obstore's, which asks for some MiB.
_READ_SECONDS = 60
# Obstore asks for credentials again some minutes before these have passed.
_CREDENTIALS_FOR = timedelta(minutes=10)
_NO_REGION = ("", "aws-global")
_USUAL_REGION = "us-east-1"


class SmallObject(NamedTuple):
    """An object that was read whole.

    Attributes:
        content: of the object.
        etag: what the service tells its versions by.
        age: seconds since it was put, by the service's clock.
    """

    content: bytes
    etag: str
    age: float


def age_of(modified: datetime, answer: Any) -> float:
    """Seconds since an object was put, by the clock of the service that tells so in an answer."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    now = parsedate_to_datetime(date) if date else datetime.now(timezone.utc)
    return (now - modified).total_seconds()


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
            f"{path}: lies in an object store; to reach it takes boto3 and obstore, which are not installed",
            file=path,
            hint="pip install 'reshard[s3]'; in the clone of reshard: pip install '.[s3]'",
        ) from error
    except ValueError as error:
        raise InputError(
            f"{path}: the object store cannot be asked: {failures.one_line(str(error))}",
            file=path,
            hint="check --endpoint-url, or AWS_ENDPOINT_URL and the profile",
        ) from error
    except OSError as error:
        raise InputError(f"{path}: the object store cannot be asked: {error.strerror}", file=path) from error


def _do_not_ask_first(params: dict[str, Any], **_: Any) -> None:
    params["headers"].pop("Expect", None)


@functools.cache
def _service(url: Optional[str]) -> Service:
    return Service(url)


class Service:
    """A service and the clients that ask it; for any number of threads.

    Args:
        url: where it is; None for what environment and profile say.

    Attributes:
        client: boto3's.
        name: what tells it from others; no user or password is in it.

    Raises:
        ImportError: a package is missing.
        ValueError: the settings are none.
        OSError: the profile is not there.
    """

    def __init__(self, url: Optional[str] = None) -> None:
        import boto3
        import obstore.store  # noqa: F401
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        settings: dict[str, Any] = {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "max_pool_connections": _CONNECTIONS,
            # One place repeats what failed: `ask`, and of obstore's requests the reader.
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
            self.client: Any = session.client("s3", endpoint_url=url, config=config)
            # What is put is sent along at once: to ask first whether it may be costs a round trip more each time.
            self.client.meta.events.register_last("before-call.s3", _do_not_ask_first)
            self._credentials = session.get_credentials()
        except BotoCoreError as error:
            raise failures.of_client(error, "") from error
        place: str = self.client.meta.endpoint_url
        self.name = place.rpartition("@")[2]
        # Amazon's own endpoints are found by region, and buckets there may be of several.
        self._custom = None if ".amazonaws.com" in place else place
        self._stores: dict[str, Any] = {}
        self._lock = threading.Lock()
        # Whether it ever did what was asked: else its address may be wrong.
        self._answered = False
        self._pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="reshard-s3")

    def ask(self, path: str, operation: str, **wanted: Any) -> Any:
        """What the service answers to a request of boto3's, which is made again where it fails in a way that may pass.

        Args:
            path: what it is about, for messages.
            operation: name of the client's method.
            wanted: its arguments.

        Raises:
            OSError: it refuses, or does not answer.
        """
        return self.again(path, lambda: getattr(self.client, operation)(**wanted))

    def again(self, path: str, call: Callable[[], T]) -> T:
        """What a call of boto3 returns, which is made again where it fails in a way that may pass.

        Raises:
            OSError: it goes on to fail.
        """
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        times = 0
        while True:
            try:
                found = call()
                self._answered = True
                return found
            except (BotoCoreError, ClientError, ResponseParserError) as error:
                times += 1
                if times == failures.TIMES or not failures.may_pass(error, self._answered):
                    raise failures.of_client(error, path) from error
            time.sleep(failures.pause(times))

    def read(self, path: str) -> SmallObject:
        """A small object.

        Raises:
            OSError: as `ask`.
        """
        bucket, key = Address.parse(path)

        def get() -> SmallObject:
            found = self.client.get_object(Bucket=bucket, Key=key)
            return SmallObject(found["Body"].read(), found["ETag"], age_of(found["LastModified"], found))

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

    def delete(self, path: str) -> None:
        """Delete an object; nothing where there is none.

        Raises:
            OSError: as `ask`.
        """
        bucket, key = Address.parse(path)
        self.ask(path, "delete_object", Bucket=bucket, Key=key)

    def pages(self, path: str, bucket: str, prefix: str, delimiter: str = "") -> Iterator[Any]:
        """A list of objects, page by page.

        Raises:
            OSError: as `ask`.
        """
        wanted: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix, "Delimiter": delimiter}
        while True:
            page = self.ask(path, "list_objects_v2", **wanted)
            yield page
            if not page.get("IsTruncated"):
                return
            wanted["ContinuationToken"] = page["NextContinuationToken"]

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

    def reading(self, bucket: str, path: str) -> Any:
        """Obstore's store of a bucket.

        Raises:
            OSError: there are no credentials.
        """
        with self._lock:
            found = self._stores.get(bucket)
            if found is None:
                found = self._stores[bucket] = self._connect(bucket, path)
            return found

    def _connect(self, bucket: str, path: str) -> Any:
        from botocore.exceptions import NoCredentialsError
        from obstore.store import S3Store

        if self._credentials is None:
            raise failures.of_client(NoCredentialsError(), path)
        style = (self.client.meta.config.s3 or {}).get("addressing_style", "auto")
        settings: dict[str, Any] = {"region": self._region(bucket)}
        if self._custom is not None:
            virtual = style == "virtual"
            scheme, _, place = self._custom.partition("://")
            settings["endpoint"] = f"{scheme}://{bucket}.{place}" if virtual else self._custom
        else:
            virtual = style != "path" and "." not in bucket
        return S3Store(
            bucket,
            virtual_hosted_style_request=virtual,
            credential_provider=self._provide,
            client_options={
                "allow_http": True,
                "connect_timeout": f"{_CONNECT_SECONDS}s",
                "timeout": f"{_READ_SECONDS}s",
                "pool_max_idle_per_host": str(_CONNECTIONS),
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
            **settings,
        )

    def _provide(self) -> dict[str, Any]:
        frozen = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + _CREDENTIALS_FOR,
        }

    def _region(self, bucket: str) -> str:
        region = self.client.meta.region_name or ""
        if self._custom is None:
            # Buckets of other regions answer to their own alone; who may not ask has to name it.
            with contextlib.suppress(Exception):
                headers = self.client.head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
                region = headers.get("x-amz-bucket-region", region)
        return _USUAL_REGION if region in _NO_REGION else region
