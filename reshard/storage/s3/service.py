"""The service of objects: address, credentials, client, and its errors as `OSError`.

Credentials come from boto3's usual sources: environment, profile, role of the machine or container. boto3 retries
requests that fail.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Collection, Iterator
from typing import Any, Optional, TypeVar
from urllib.parse import urlsplit

from reshard.errors import InputError
from reshard.storage.registry import endpoint
from reshard.storage.s3.address import Address

T = TypeVar("T")

CHANGED = "it was replaced or changed while it was read"
# Connections for reading and for sending threads.
_CONNECTIONS = 192
_CONNECT_SECONDS = 10
# Seconds without a byte.
_READ_SECONDS = 20
_TRIES = 5
_MAX_TEXT = 200
# Credentials that the service rejects, with any status.
_REJECTED = ("ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "TokenRefreshRequired")


class StrangeAnswer(OSError):
    """A well-formed answer of the service with impossible content."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(errno.EPROTO, f"the object store's answer is invalid: {problem}", path)


def field(answer: Any, name: str, kind: type[T], path: str) -> T:
    """A required field of an answer.

    Raises:
        StrangeAnswer: it is missing.
    """
    value = answer.get(name)
    if not isinstance(value, kind):
        raise StrangeAnswer(path, f"{name} is missing" if value is None else f"{name} is {str(value)[:80]!r}")
    return value


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
    except (ValueError, OSError) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(
            f"{path}: the object store cannot be used: {_one_line(problem)}",
            file=path,
            hint="check --endpoint-url, or AWS_ENDPOINT_URL and the profile",
        ) from None


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
        tries: how often a request is made that fails.

    Raises:
        ImportError: a package is missing.
        ValueError: the settings are wrong.
        OSError: the profile is missing.
    """

    def __init__(self, url: Optional[str] = None) -> None:
        self._url = url
        self.tries = _TRIES
        # By process: two readers of a connection get parts of each other's bytes. A parent's client is kept, because
        # closing its connections in a forked child would disturb the parent.
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
        """A client and its credentials."""
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
            raise _error_of(error, "", ()) from None

    @property
    def _secrets(self) -> list[str]:
        """Credentials that messages must not contain."""
        try:
            credentials = self._clients[os.getpid()][1].get_frozen_credentials()
        except Exception:
            # The request that needs them reports this.
            return []
        return [text for text in (credentials.access_key, credentials.secret_key, credentials.token) if text]

    def request(self, path: str, operation: str, **arguments: Any) -> Any:
        """The service's answer to a request about an object.

        Args:
            path: path of the object.
            operation: name of the client's method.
            arguments: its arguments, besides bucket and key of the path.

        Raises:
            OSError: the service refuses, or does not answer.
        """
        bucket, key = Address.parse(path)
        with self.errors_as_of_files(path):
            return getattr(self.client, operation)(Bucket=bucket, Key=key, **arguments)

    def pages(self, path: str, prefix: str, **arguments: Any) -> Iterator[Any]:
        """The lists of objects whose keys begin with a prefix, in the bucket of a path.

        Raises:
            OSError: as `request`.
        """
        paginator = self.client.get_paginator("list_objects_v2")
        pages = iter(paginator.paginate(Bucket=Address.parse(path).bucket, Prefix=prefix, **arguments))
        while True:
            with self.errors_as_of_files(path):
                page = next(pages, None)
            if page is None:
                return
            if page.get("IsTruncated"):
                # Without it, boto3 takes the list for complete.
                field(page, "NextContinuationToken", str, path)
            yield page

    @contextlib.contextmanager
    def errors_as_of_files(self, path: str) -> Iterator[None]:
        """Raise errors of boto3 in a block as those of a file: `OSError`, or `InputError` for a missing bucket.

        Args:
            path: path that the requests are about, for messages.
        """
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (BotoCoreError, ClientError, ResponseParserError, HTTPError, ValueError, LookupError) as error:
            raise _error_of(error, path, self._secrets) from None


def _error_of(error: Exception, path: str, secrets: Collection[str]) -> Exception:
    """The error to raise for an error of boto3: an `OSError`, or an `InputError` for a missing bucket."""
    from botocore.exceptions import ClientError, CredentialRetrievalError, NoCredentialsError, ProfileNotFound
    from botocore.exceptions import PartialCredentialsError as PartialError

    if isinstance(error, (NoCredentialsError, PartialError)):
        return PermissionError(
            errno.EACCES,
            "credentials are missing: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the "
            "machine a role",
            path,
        )
    text = _one_line(str(error), secrets)
    if isinstance(error, (CredentialRetrievalError, ProfileNotFound)):
        return PermissionError(errno.EACCES, text, path)
    if not isinstance(error, ClientError):
        return OSError(errno.EIO, f"the object store returned an unexpected answer: {text}", path)
    answer = error.response.get("Error", {})
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code, message = str(answer.get("Code", "")), str(answer.get("Message", ""))
    text = _one_line(f"{code}: {message}" if message and not code.isdigit() else message or code, secrets)
    if code == "NoSuchBucket":
        return InputError(
            f"{path}: this object store has no bucket {path.split('/')[2]!r}",
            file=path,
            hint="check the name, --endpoint-url or AWS_ENDPOINT_URL, and the profile; or create the bucket",
        )
    if status == 404:
        return FileNotFoundError(errno.ENOENT, text, path)
    if status in (401, 403) or code in _REJECTED:
        return PermissionError(errno.EACCES, text, path)
    if 300 <= status < 400:
        text = f"the object store redirects to another address ({text}); check --endpoint-url and the region"
        return OSError(errno.EIO, text, path)
    if status == 416:
        return OSError(errno.ERANGE, text, path)
    if status == 501:
        return OSError(errno.ENOTSUP, text, path)
    if status in (409, 412):
        return OSError(errno.ESTALE, CHANGED, path)
    return OSError(errno.EIO, f"the object store returned an unexpected answer: {text or f'status {status}'}", path)


def _one_line(text: str, secrets: Collection[str] = ()) -> str:
    """The beginning of a text, in one line, without credentials."""
    text = " ".join(text.split())
    if "@" in text:
        # A password may contain any characters, and text of boto3 contains URLs.
        text = " ".join(word if "@" not in word else f"...@{word.rpartition('@')[2]}" for word in text.split(" "))
    for secret in secrets:
        text = text.replace(secret, "...")
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
