"""Addresses of Dask schedulers."""

from __future__ import annotations

import errno
import re
from typing import Optional

from distributed import Security
from distributed.comm.addressing import get_address_host_port, parse_address
from distributed.comm.registry import get_backend

from reshard.errors import UsageError
from reshard.storage import UnfitError, exists, read_small, too_long
from reshard.storage.json_text import Fields, JsonError, parse_json

# A scheduler file of many workers has some hundred KB.
_MAX_FILE = 64 << 20
# Optional scheme, name or address (IPv6 in brackets), port.
_ADDRESS = re.compile(
    r"(?:[a-z][a-z0-9]{0,31}://)?(?:[\w.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%[\w.-]{1,32})?\]):(\d{1,5})", re.ASCII
)
_ENCRYPTED = ("tls", "wss")


def scheduler_address(typed: str) -> str:
    """The address of a scheduler, typed or from its scheduler file.

    Raises:
        UsageError: it is neither an address nor a scheduler file.
    """
    if "://" in typed:
        _check_form(typed)
        return typed
    if not exists(typed) and _ADDRESS.fullmatch(typed):
        return typed
    try:
        address = Fields(parse_json(read_small(typed, _MAX_FILE)), "the file").text("address")
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
    _check_form(address, file=typed)
    return address


def _check_form(address: str, file: Optional[str] = None) -> None:
    """Refuse anything but ``scheme://host:port`` before Dask parses it."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[1]) < 1 << 16:
        shown = address if len(address) < 80 else f"{address[:80]}..."
        where = "" if file is None else f"{file}: "
        raise UsageError(
            f"{where}Dask cannot use this address: {shown!r} is not of the form tcp://host:8786", file=file
        )


def check_address(address: str) -> None:
    """Refuse an address that Dask cannot use: a client with such an address would not close."""
    try:
        scheme, _ = parse_address(address)
        get_backend(scheme)
        get_address_host_port(address)
        security = Security()
        if scheme in _ENCRYPTED and security.get_connection_args("client").get("ssl_context") is None:
            raise ValueError("Dask's configuration has no certificates for TLS")
        if scheme not in _ENCRYPTED and security.require_encryption:
            raise ValueError("Dask's configuration requires encryption (tls://)")
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        raise UsageError(f"{address}: Dask cannot use this address: {error}") from error
