"""Addresses of Dask schedulers."""

from __future__ import annotations

import errno
import re

from distributed import Security
from distributed.comm.addressing import get_address_host_port, parse_address
from distributed.comm.registry import get_backend

from reshard.errors import UsageError
from reshard.storage import UnfitError, exists, read_small, too_long
from reshard.storage.json_text import Fields, JsonError, parse_json

# With many workers some hundred KB.
_LARGEST = 64 << 20
_HOST_AND_PORT = re.compile(r"[^/\s]+:\d{1,5}")


def scheduler_address(typed: str) -> str:
    """The address of a scheduler, as typed or as its scheduler file says.

    Raises:
        UsageError: it is neither.
    """
    if "://" in typed:
        return typed
    if not exists(typed) and _HOST_AND_PORT.fullmatch(typed):
        return typed
    try:
        return Fields(parse_json(read_small(typed, _LARGEST)), "the file").text("address")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise too_long(typed) from error
        raise UsageError(
            f"{typed}: is no address such as tcp://host:8786, and cannot be read as a scheduler file: "
            f"{error.strerror or error}",
            file=typed,
        ) from error
    except (JsonError, UnfitError) as error:
        raise UsageError(
            f"{typed}: is not a scheduler file: {error}",
            file=typed,
            hint="dask scheduler --scheduler-file FILE writes one",
        ) from error


def check_address(address: str) -> None:
    """Refuse what Dask cannot connect to; a client that fails for such a reason does not close."""
    try:
        scheme, _ = parse_address(address)
        get_backend(scheme)
        get_address_host_port(address)
        if scheme == "tls" and Security().get_connection_args("client").get("ssl_context") is None:
            raise ValueError("Dask's configuration names no certificates for TLS")
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        raise UsageError(f"{address}: Dask cannot use this address: {error}") from error
