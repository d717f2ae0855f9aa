"""A real object store on the loopback interface: a monitor and an OSD of Ceph in memory, and its gateway."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
_START_SECONDS = 100
_ATTEMPTS = 3
_CONFIGURATION = """\
[global]
fsid = {fsid}
mon_host = v1:127.0.0.1:{monitor}
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
run_dir = {place}
crash_dir = {place}
mon_data = {place}/monitor
osd_data = {place}/osd
keyring = {place}/keyring
admin_socket =
log_file =
mon_cluster_log_file =
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 2
osd_pool_default_pgp_num = 2
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
rgw_frontends = beast endpoint=127.0.0.1:{gateway}
"""


def missing_programs() -> list[str]:
    """Programs of Ceph that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextlib.contextmanager
def running(key: str, secret: str) -> Iterator[str]:
    """Start everything; the URL of the gateway, which has one user.

    Args:
        key: the user's access key.
        secret: the user's secret key.

    Raises:
        NotStartedError: it does not start, in several attempts.
    """
    problem = ""
    for _ in range(_ATTEMPTS):
        with contextlib.ExitStack() as stack:
            cluster = _Cluster(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ceph"))), stack)
            try:
                cluster.start(key, secret)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                # An OSD may die while its monitor is slow.
                problem = str(error)
                continue
            yield f"http://127.0.0.1:{cluster.port}"
            return
    raise NotStartedError(problem)


class NotStartedError(Exception):
    """A cluster that does not start on this machine."""


class _Cluster:
    """A cluster in a directory, which ends with a stack."""

    def __init__(self, place: Path, stack: contextlib.ExitStack) -> None:
        self._place = place
        self._stack = stack
        self._configuration = place / "ceph.conf"
        self._monitor, self.port = _free_ports(2)

    def start(self, key: str, secret: str) -> None:
        number, disk = str(uuid.uuid4()), str(uuid.uuid4())
        settings = {"fsid": number, "monitor": self._monitor, "gateway": self.port, "place": self._place}
        self._configuration.write_text(_CONFIGURATION.format(**settings))
        (self._place / "osd").mkdir()
        monitors = self._place / "monitors"
        address = f"[v1:127.0.0.1:{self._monitor}]"
        self._run("monmaptool", "--create", "--addv", "a", address, "--fsid", number, str(monitors))
        self._run("ceph-mon", "--mkfs", "--id", "a", "--monmap", str(monitors))
        self._daemon("ceph-mon", "--id", "a")
        self._run("ceph", "osd", "new", disk)
        self._run("ceph-osd", "--mkfs", "--id", "0", "--osd-uuid", disk)
        self._daemon("ceph-osd", "--id", "0")
        # Waits for both.
        user = ["--uid", "user", "--display-name", "user", "--access-key", key, "--secret-key", secret]
        self._run("radosgw-admin", "user", "create", *user)
        self._daemon("radosgw", "--name", "client.gateway")
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.1)
        raise AssertionError(f"the gateway does not start: {(self._place / 'radosgw.log').read_text()[-2000:]}")

    def _run(self, program: str, *words: str) -> None:
        command = [program, "--conf", str(self._configuration), *words]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_START_SECONDS)
        assert result.returncode == 0, f"{command}: {result.stderr[-2000:]}"

    def _daemon(self, program: str, *words: str) -> None:
        command = [program, "--conf", str(self._configuration), "--foreground", *words]
        with open(self._place / f"{program}.log", "wb") as log:
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._stack.enter_context(daemon)
        self._stack.callback(daemon.kill)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
