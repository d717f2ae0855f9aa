"""The CPUs of a process: its affinity, and quotas of containers and batch systems."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from reshard import defaults
from reshard.defaults import usable_cpus
from reshard.storage import store as costs
from reshard.storage.store import LOCAL, OBJECTS, REMOTE, busy_cpus

V2, V1 = "0::/job/step\n", "5:memory:/m\n4:cpu,cpuacct:/docker/abc\n0::/\n"
CPU = "/sys/fs/cgroup/cpu,cpuacct"


@pytest.fixture(autouse=True)
def _without_cache() -> Iterator[None]:
    defaults._quotas.cache_clear()
    yield
    defaults._quotas.cache_clear()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"/proc/self/cgroup": V2}, 64),
        ({"/proc/self/cgroup": V2, "/sys/fs/cgroup/job/step/cpu.max": "max 100000\n"}, 64),
        ({"/proc/self/cgroup": V2, "/sys/fs/cgroup/job/step/cpu.max": "250000 100000\n"}, 3),
        # A group above has less.
        ({"/proc/self/cgroup": V2, "/sys/fs/cgroup/job/cpu.max": "200000 100000\n"}, 2),
        # In a container, its own group is the root.
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "800000 100000\n"}, 8),
        ({"/proc/self/cgroup": V2, "/sys/fs/cgroup/job/step/cpu.max": "5000 100000\n"}, 1),
        ({"/proc/self/cgroup": V2, "/sys/fs/cgroup/job/step/cpu.max": "9900000 100000\n"}, 64),
        ({"/proc/self/cgroup": V1, f"{CPU}/cpu.cfs_quota_us": "-1\n", f"{CPU}/cpu.cfs_period_us": "100000\n"}, 64),
        ({"/proc/self/cgroup": V1, f"{CPU}/cpu.cfs_quota_us": "400000\n", f"{CPU}/cpu.cfs_period_us": "100000\n"}, 4),
        (
            {
                "/proc/self/cgroup": V1,
                f"{CPU}/docker/abc/cpu.cfs_quota_us": "150000\n",
                f"{CPU}/docker/abc/cpu.cfs_period_us": "50000\n",
            },
            3,
        ),
        # Damaged.
        ({"/proc/self/cgroup": V2, "/sys/fs/cgroup/job/cpu.max": "200000 0\n"}, 64),
    ],
)
def test_a_quota_limits_the_cpus(files: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(defaults, "_text", lambda path: files.get(os.path.normpath(path), ""))
    assert usable_cpus() == expected


def test_no_more_jobs_than_cpus_work_between_local_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would only take turns; requests to other storage wait."""
    monkeypatch.setattr(costs, "usable_cpus", lambda: 4)
    assert busy_cpus(16, LOCAL) == busy_cpus(16, LOCAL, LOCAL) == 4
    assert busy_cpus(3, LOCAL) == 3
    assert busy_cpus(16, REMOTE, LOCAL) == busy_cpus(16, LOCAL, OBJECTS) == 16
