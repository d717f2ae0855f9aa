"""Addresses of Dask schedulers."""

from __future__ import annotations

import json
import os
import re

from distributed import Security
from distributed.comm.addressing import get_address_host_port, parse_address
from distributed.comm.registry import get_backend

from reshard.errors import UsageError

_HOST_AND_PORT = re.compile(r"[^/\s]+:\d{1,5}")


def scheduler_address(typed: str) -> str:
    """The address of a scheduler, as typed or as its scheduler file says.

    Raises:
        UsageError: it is neither.
    """
    if "://" in typed:
        return typed
    if not os.path.exists(typed) and _HOST_AND_PORT.fullmatch(typed):
        return typed
    try:
        with open(typed, encoding="utf-8") as file:
            address = json.load(file)["address"]
        if not isinstance(address, str):
            raise TypeError
    except OSError as error:
        raise UsageError(
            f"{typed}: is no address such as tcp://host:8786, and cannot be read as a scheduler file: "
            f"{error.strerror or error}",
            file=typed,
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"{typed}: is not a scheduler file", file=typed, hint="dask scheduler --scheduler-file FILE writes one"
        ) from error
    return address


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
