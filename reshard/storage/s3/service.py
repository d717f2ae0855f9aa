"""The service of objects: paths, ``s3://bucket/key``, the client, and its errors as `OSError`.

Credentials come from boto3's usual sources: environment, profile, role of the machine or container. boto3 retries
requests that fail.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from reshard.errors import InputError, UsageError
from reshard.storage.files import CHANGED
from reshard.storage.registry import endpoint

_SCHEME = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
# Other programs may resolve these names, which no object store does.
_NO_NAMES = ("", ".", "..")
_MAX_KEY_LENGTH = 1024

# Connections for reading and for sending threads.
_CONNECTIONS = 192
_CONNECT_SECONDS = 10
# Seconds without a byte.
_READ_SECONDS = 20
_TRIES = 5
_MAX_TEXT = 200
# Credentials that the service rejects, with any status.
_REJECTED = ("ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "TokenRefreshRequired")
_NUMBERS = {
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    409: errno.ESTALE,
    412: errno.ESTALE,
    416: errno.ERANGE,
    501: errno.ENOTSUP,
}
"""The error of a file for a status of HTTP."""


class Address(NamedTuple):
    """The place of an object, or of a directory of objects.

    Attributes:
        bucket: name of the bucket.
        key: key of the object, or the common beginning of a directory's keys, without a trailing slash; empty for all.
    """

    bucket: str
    key: str

    @classmethod
    def parse(cls, path: str) -> Address:
        """The address of a path; a `UsageError` if no object can have it."""
        bucket, _, key = path[len(_SCHEME) :].partition("/")
        key = key.rstrip("/")
        if not _BUCKET.fullmatch(bucket):
            raise UsageError(
                f"{path}: {f'{bucket!r} is no name of a bucket' if bucket else 'names no bucket'}",
                file=path,
                hint="an object's path is s3://bucket/prefix; a bucket's name has two letters or more",
            )
        names = key.split("/") if key else []
        if any(name in _NO_NAMES or "\0" in name for name in names):
            raise UsageError(
                f"{path}: holds an empty name, '.' or '..'",
                file=path,
                hint="write the key as it is: s3://bucket/prefix/name",
            )
        if len(key.encode(errors="surrogateescape")) > _MAX_KEY_LENGTH:
            raise UsageError(f"{path[:300]}...: is too long for a key", file=path, hint="give a shorter one")
        return cls(bucket, key)

    @property
    def prefix(self) -> str:
        """The common beginning of all keys in this directory."""
        return f"{self.key}/" if self.key else ""


def number_of(*parts: str) -> int:
    """A number below 2**63 that identifies texts."""
    digest = hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def service(path: str) -> Service:
    """The service, connected once; ``path`` is named in messages.

    Raises:
        InputError: a package is missing, or the settings are wrong.
    """
    try:
        return _service(endpoint())
    except ImportError as error:
        raise InputError(
            f"{path}: is in an object store, which needs boto3; boto3 is not installed",
            file=path,
            hint="pip install boto3",
        ) from error
    except (ValueError, OSError) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(
            f"{path}: the object store cannot be used: {_one_line(problem)}",
            file=path,
            hint="check --endpoint-url, or AWS_ENDPOINT_URL and the profile",
        ) from None


class Service:
    """A service and its client; for any number of threads.

    Args:
        url: its address; None for that of environment and profile.

    Attributes:
        name: unique name of the service.
        tries: how often a request is made that fails.

    Raises:
        ImportError: a package is missing.
        ValueError: the settings are wrong.
        OSError: the profile is missing.
    """

    def __init__(self, url: str | None = None) -> None:
        self._url = url
        self.tries = _TRIES
        # Clients and credentials by process: two readers of a connection get parts of each other's bytes. A parent's
        # client is kept, because closing its connections in a forked child would disturb the parent.
        self._clients: dict[int, tuple[Any, Any]] = {}
        self.name: str = self.client.meta.endpoint_url

    @property
    def client(self) -> Any:
        """boto3's client, of this process alone."""
        process = os.getpid()
        if process not in self._clients:
            self._clients[process] = self._connect()
        return self._clients[process][0]

    def _connect(self) -> tuple[Any, Any]:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        config = Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            max_pool_connections=_CONNECTIONS,
            retries={"mode": "standard", "total_max_attempts": self.tries},
            user_agent_extra="reshard",
            # Most services other than Amazon's do not support checksums in trailers, boto3's default.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # The digest of sent bytes is signed: damage in transit is refused, with HTTP, too.
            s3={"payload_signing_enabled": True},
        )
        try:
            session = boto3.session.Session()
            client = session.client("s3", endpoint_url=self._url and _without_user(self._url), config=config)
            if "@" in client.meta.endpoint_url:
                bare = _without_user(client.meta.endpoint_url)
                client = session.client("s3", endpoint_url=bare, config=config)
            # Content is sent at once: to wait for "100 Continue" costs another round trip.
            client.meta.events.register_last("before-call.s3", _without_expect)
            return client, session.get_credentials()
        except BotoCoreError as error:
            raise self._error_of(error, "") from None

    def request(self, path: str, operation: str, **arguments: Any) -> Any:
        """The service's answer to a request of the client about an object; every failure is an `OSError`."""
        from urllib3.exceptions import HTTPError

        bucket, key = Address.parse(path)
        with self.errors_as_of_files(path):
            send = functools.partial(getattr(self.client, operation), Bucket=bucket, Key=key, **arguments)
            for _ in range(self.tries - 1):
                # Content of an error that is cut off: older versions of boto3 do not repeat the request.
                with contextlib.suppress(HTTPError):
                    return send()
            return send()

    def pages(self, path: str, prefix: str, **arguments: Any) -> Iterator[Any]:
        """The lists of objects whose keys begin with a prefix, in the bucket of a path."""
        paginator = self.client.get_paginator("list_objects_v2")
        pages = iter(paginator.paginate(Bucket=Address.parse(path).bucket, Prefix=prefix, **arguments))
        while True:
            with self.errors_as_of_files(path):
                page = next(pages, None)
                if page is None:
                    return
                if page.get("IsTruncated"):
                    # Without it, boto3 takes the list for complete.
                    page["NextContinuationToken"]
            yield page

    @contextlib.contextmanager
    def errors_as_of_files(self, path: str) -> Iterator[None]:
        """Raise errors of boto3 in a block as errors of a file: `OSError`, or `InputError` for a missing bucket."""
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (BotoCoreError, ClientError, ResponseParserError, HTTPError, ValueError, LookupError) as error:
            raise self._error_of(error, path) from None

    def _error_of(self, error: Exception, path: str) -> Exception:
        from botocore.exceptions import ClientError, CredentialRetrievalError, NoCredentialsError, ProfileNotFound
        from botocore.exceptions import PartialCredentialsError as PartialError

        if isinstance(error, (NoCredentialsError, PartialError)):
            return PermissionError(
                errno.EACCES,
                "credentials are missing: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the "
                "machine a role",
                path,
            )
        if isinstance(error, (CredentialRetrievalError, ProfileNotFound)):
            return PermissionError(errno.EACCES, self._without_secrets(str(error)), path)
        if not isinstance(error, ClientError):
            return unexpected(path, self._without_secrets(str(error)))
        answer = error.response.get("Error", {})
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code, message = str(answer.get("Code", "")), str(answer.get("Message", ""))
        text = self._without_secrets(f"{code}: {message}" if message and not code.isdigit() else message or code)
        if code == "NoSuchBucket":
            return InputError(
                f"{path}: this object store has no bucket {path.split('/')[2]!r}",
                file=path,
                hint="check the name, --endpoint-url or AWS_ENDPOINT_URL, and the profile; or create the bucket",
            )
        number = errno.EACCES if code in _REJECTED else _NUMBERS.get(status)
        if number is not None:
            return OSError(number, CHANGED if number == errno.ESTALE else text, path)
        if 300 <= status < 400:
            text = f"the object store redirects to another address ({text}); check --endpoint-url and the region"
            return OSError(errno.EIO, text, path)
        return unexpected(path, text or f"status {status}")

    def _without_secrets(self, text: str) -> str:
        # The request that needs credentials reports errors of them.
        with contextlib.suppress(Exception):
            credentials = self._clients[os.getpid()][1].get_frozen_credentials()
            for secret in (credentials.access_key, credentials.secret_key, credentials.token):
                text = text.replace(secret, "...") if secret else text
        return _one_line(text)


_service = functools.cache(Service)


def unexpected(path: str, problem: str) -> OSError:
    """The error for an answer that no working service gives."""
    return OSError(errno.EIO, f"the object store returned an unexpected answer: {problem}", path)


def _without_expect(params: dict[str, Any], **_: Any) -> None:
    params["headers"].pop("Expect", None)


def _without_user(url: str) -> str:
    """A URL without user and password: requests do not use them, messages would show them."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _one_line(text: str) -> str:
    """The beginning of a text, in one line, without passwords in URLs, which may contain any characters."""
    words = [f"...@{word.rpartition('@')[2]}" if "@" in word else word for word in text.split()]
    line = " ".join(words)
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}..."
