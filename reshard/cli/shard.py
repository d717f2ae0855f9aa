"""--shard: which share of the work this run takes, as typed or as its launcher says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

import click

# Launchers, by the variables in which they tell index and count.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),
)
_MOST = 1 << 20


class Share(NamedTuple):
    """One of several runs: its number, from 0, and how many there are."""

    number: int
    runs: int


class ShardType(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """``I/N``, or ``auto`` for what Slurm, Kubernetes or an MPI launcher says."""

    name = "shard"

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> Share:
        """The share."""
        if isinstance(value, Share):
            return value
        try:
            if value == "auto":
                return launched_as(os.environ)
            match = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", str(value))
            if not match:
                raise ValueError(f"{value!r} is not a shard such as 0/4, the first of four, or auto")
            return _checked(int(match[1]), int(match[2]))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def launched_as(environment: Mapping[str, str]) -> Share:
    """The share that a launcher gave to this process.

    A task of a Slurm array comes first, then MPI launchers, `srun`, and Kubernetes Indexed Jobs, which
    tell the index only: the count is expected in ``JOB_COMPLETIONS``.

    Raises:
        ValueError: nothing tells, or what tells makes no sense.
    """
    if "SLURM_ARRAY_TASK_ID" in environment:
        names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_COUNT")
        task, first, last, count = (_number(environment, name) for name in names)
        step = (last - first) // (count - 1) if count > 1 else 1
        if step < 1 or first + step * (count - 1) != last or (task - first) % step:
            raise ValueError(f"tasks {first} to {last} of the Slurm array are not evenly numbered; pass --shard I/N")
        return _checked((task - first) // step, count)
    for index, count_name in _LAUNCHERS:
        if index in environment:
            return _checked(_number(environment, index), _number(environment, count_name))
    raise ValueError(
        "auto finds no variables of a Slurm array or step, an MPI launcher or a Kubernetes Indexed Job; "
        "pass --shard I/N"
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not re.fullmatch(r"\d{1,9}", text):
        what = f"is {text!r}" if text else "is not set"
        raise ValueError(f"auto needs {name}, which {what}")
    return int(text)


def _checked(index: int, count: int) -> Share:
    if not 0 < count <= _MOST or not 0 <= index < count:
        raise ValueError(f"{index}/{count} is no shard: they are counted from 0, here 0/{count} to {count - 1}/{count}")
    return Share(index, count)
