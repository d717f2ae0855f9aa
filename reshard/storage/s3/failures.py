"""Errors of an object store as `OSError`: one line each, without credentials."""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Collection
from typing import Any

from reshard.errors import InputError

CHANGED = "it was replaced or changed while it was read"

MAX_TRIES = 9
"""Requests that fail in a row without a byte of progress, before it is an error: some 15 seconds with the pauses."""
PATIENCE = 40.0
"""Seconds without a byte of progress before it is an error, where each request takes long to fail."""
_FIRST_PAUSE = 0.1
_MAX_PAUSE = 5.0
_MAX_TEXT = 200
_NOT_IMPLEMENTED = 501
# Also in an endpoint without a scheme; a password may contain slashes and other characters that URLs forbid.
_USER_OF_URL = re.compile(r"(//|^Invalid endpoint: )\S*@")
# Answers of overloaded services, with various statuses.
_BUSY = (
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestTimeout",
    "RequestTimeTooSkewed",
    # Another process writes the same object conditionally at this moment.
    "ConditionalRequestConflict",
    "OperationAborted",
    "TooManyRequests",
    "429",
)
# Credentials that the service rejects, with any status.
_REJECTED = ("ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "TokenRefreshRequired")
_WRONG = "the object store returned an unexpected answer"
_CREDENTIALS = (
    "credentials are missing: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine "
    "a role"
)


class StrangeAnswer(OSError):
    """A well-formed answer of the service with impossible content."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(errno.EPROTO, f"the object store's answer is invalid: {problem}", path)


def pause(times: int) -> float:
    """Seconds to wait after ``times`` failed requests; random, so that threads do not retry at the same times."""
    return min(_MAX_PAUSE, _FIRST_PAUSE * float(2 ** (times - 1))) * random.uniform(0.5, 1)


def error_of(error: Exception, path: str, secrets: Collection[str] = ()) -> Exception:
    """The error to raise for an error of boto3: an `OSError`, or an `InputError` for a missing bucket."""
    from botocore.exceptions import (
        ClientError,
        CredentialRetrievalError,
        NoCredentialsError,
        PartialCredentialsError,
        ProfileNotFound,
    )

    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return PermissionError(errno.EACCES, _CREDENTIALS, path)
    text = one_line(str(error), secrets)
    if isinstance(error, (CredentialRetrievalError, ProfileNotFound)):
        return PermissionError(errno.EACCES, text, path)
    if isinstance(error, ClientError):
        return _of_response(error.response, path, secrets)
    return OSError(errno.EIO, f"{_WRONG}: {text}", path)


def may_pass(error: Exception, reached: bool) -> bool:
    """Whether a retry of the request may succeed.

    Args:
        error: raised by boto3.
        reached: the service has answered before, so its address is correct.
    """
    from botocore.exceptions import (
        ClientError,
        ConnectTimeoutError,
        EndpointConnectionError,
        HTTPClientError,
        IncompleteReadError,
        ResponseStreamingError,
    )
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if isinstance(error, ClientError):
        status = status_of(error)
        return (status >= 500 and status != _NOT_IMPLEMENTED) or error.response.get("Error", {}).get("Code") in _BUSY
    if isinstance(error, (EndpointConnectionError, ConnectTimeoutError)):
        return reached
    # A truncated answer cannot be parsed. Older boto3 passes on errors of urllib3 from the content of error answers.
    truncated = (IncompleteReadError, ResponseStreamingError, ResponseParserError, HTTPError)
    return isinstance(error, (HTTPClientError, *truncated))


def status_of(error: Exception) -> int:
    """The HTTP status of an error answer; 0 if it has none."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _of_response(response: dict[str, Any], path: str, secrets: Collection[str]) -> Exception:
    answer = response.get("Error", {})
    code, message = str(answer.get("Code", "")), str(answer.get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    text = one_line(f"{code}: {message}" if message and not code.isdigit() else message or code, secrets)
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
    if status == _NOT_IMPLEMENTED:
        return OSError(errno.ENOTSUP, text, path)
    if status == 412:
        return OSError(errno.ESTALE, CHANGED, path)
    if 300 <= status < 400:
        advice = "redirects to another address, which is not followed: pass the bucket's own as --endpoint-url"
        return OSError(errno.EREMOTE, f"the object store {advice} ({code or status})", path)
    return OSError(errno.EIO, f"{_WRONG}: {text or f'status {status}'}", path)


def one_line(text: str, secrets: Collection[str] = ()) -> str:
    """The beginning of a text, in one line, without credentials."""
    text = _USER_OF_URL.sub(r"\1", " ".join(text.split()))
    for secret in secrets:
        text = text.replace(secret, "...")
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
