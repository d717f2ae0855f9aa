"""What goes wrong at an object store, in the words of the system: as `OSError`, in one line, with nothing secret."""

from __future__ import annotations

import errno
import random
from typing import Any, Optional

CHANGED = "it was replaced or changed while it was read"

# Requests that fail without a byte read, one after the other, before it is given up: a quarter of a minute.
TIMES = 9
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_LONGEST_TEXT = 200
_NOT_IMPLEMENTED = 501
# Refusals of services that have too much to do, whatever status they give them.
_BUSY = (
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestTimeout",
    "RequestTimeTooSkewed",
    # Another one writes the same object under a condition at this moment.
    "ConditionalRequestConflict",
    "OperationAborted",
    "TooManyRequests",
    "429",
)
_CREDENTIALS = (
    "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine "
    "a role"
)


def pause(times: int) -> float:
    """Seconds to wait after a request has failed so many times, from 1 on; not the same for all that failed at once."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * float(2 ** (times - 1))) * random.uniform(0.5, 1)


def of_client(error: Exception, path: str) -> OSError:
    """The error for what boto3 raised."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        CredentialRetrievalError,
        NoCredentialsError,
        PartialCredentialsError,
        ProfileNotFound,
    )

    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return PermissionError(errno.EACCES, _CREDENTIALS, path)
    if isinstance(error, (CredentialRetrievalError, ProfileNotFound)):
        return PermissionError(errno.EACCES, one_line(str(error)), path)
    if isinstance(error, ClientError):
        return _of_response(error.response, path)
    if isinstance(error, BotoCoreError):
        return OSError(errno.EIO, one_line(str(error)), path)
    return OSError(errno.EIO, f"{type(error).__name__}: {one_line(str(error))}", path)


def may_pass(error: Exception, reached: bool) -> bool:
    """Whether what boto3 raised may be gone when the same is asked again.

    Args:
        error: what was raised.
        reached: whether the service has ever done what was asked; then it can be connected to.
    """
    from botocore.exceptions import (
        ClientError,
        ConnectTimeoutError,
        EndpointConnectionError,
        HTTPClientError,
        IncompleteReadError,
    )
    from botocore.parsers import ResponseParserError

    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return (status >= 500 and status != _NOT_IMPLEMENTED) or error.response.get("Error", {}).get("Code") in _BUSY
    if isinstance(error, (EndpointConnectionError, ConnectTimeoutError)):
        return reached
    # An answer that was cut off is one that cannot be parsed.
    return isinstance(error, (HTTPClientError, IncompleteReadError, ResponseParserError))


def _of_response(response: dict[str, Any], path: str) -> OSError:
    said = response.get("Error", {})
    code, message = str(said.get("Code", "")), str(said.get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    text = one_line(f"{code}: {message}" if message and not code.isdigit() else message or code)
    if status == 404:
        return FileNotFoundError(errno.ENOENT, text, path)
    if status in (401, 403):
        return PermissionError(errno.EACCES, text, path)
    if status == _NOT_IMPLEMENTED:
        return OSError(errno.ENOTSUP, text, path)
    if status == 412:
        return OSError(errno.ESTALE, CHANGED, path)
    return OSError(errno.EIO, text or f"status {status}", path)


def lasting(error: Exception, path: str) -> Optional[OSError]:
    """The error for what obstore raised, where asking again gives no other answer; else None."""
    from obstore import exceptions

    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "there is no such object", path)
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)):
        return PermissionError(errno.EACCES, "the store does not allow it", path)
    if isinstance(error, exceptions.PreconditionError):
        return OSError(errno.ESTALE, CHANGED, path)
    if isinstance(error, (exceptions.InvalidPathError, exceptions.NotSupportedError)):
        return OSError(errno.EINVAL, one_line(str(error)), path)
    if isinstance(error, OSError) and error.errno == errno.ESTALE:
        return error
    return None


def passing(error: Exception, path: str) -> OSError:
    """The error for what obstore raised again and again."""
    return OSError(errno.EIO, f"the store does not answer as it should: {one_line(str(error))}", path)


def one_line(text: str) -> str:
    """The beginning of a text, in one line."""
    # Obstore repeats itself in terms of its own.
    text = " ".join(text.partition("Debug source:")[0].split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
