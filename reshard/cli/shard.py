"""--shard: this run's share of the work, as typed or from its launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Launchers, by their variables of index and count.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),
)
# Variables of training programs and containers: of torchrun, of platforms for Ascend, and of MindSpore's
# dynamic cluster, where the ids of nodes may be any text.
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("RANK_ID", "RANK_SIZE"),
    ("MS_NODE_ID", "MS_WORKER_NUM"),
)
# Its scheduler runs the same command, and has no share.
_WORKER = "MS_WORKER"
_NUMBER = re.compile(r"[0-9]{1,9}")
_MAX_RUNS = 1 << 20


class Share(NamedTuple):
    """One of several runs: its number, from 0, and their count."""

    number: int
    runs: int


def parse_share(text: str) -> Share:
    """The share in ``I/N``, or in ``auto`` for the launcher's variables.

    Raises:
        ValueError: it is invalid, or variables are missing, invalid or contradictory.
    """
    if text == "auto":
        return launched_as(os.environ)
    match = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
    if not match:
        raise ValueError(f"{text!r} is not a shard such as 0/4, the first of four, or auto")
    return _checked(int(match[1]), int(match[2]))


def launched_as(environment: Mapping[str, str]) -> Share:
    """The share that a launcher gave to this process.

    A task of a Slurm array comes first, then MPI launchers, `srun`, and Kubernetes Indexed Jobs, which
    set the index only: the count is expected in ``JOB_COMPLETIONS``. One starts the other, so the first
    match wins. Variables of other programs count only without a contradiction.

    Raises:
        ValueError: variables are missing, invalid or contradictory.
    """
    claims = [*_launched(environment), *_set_elsewhere(environment)]
    if not claims:
        halves = [name for pair in _RANKS for name in pair if environment.get(name)]
        lone = f" ({' and '.join(halves)} alone is not enough)" if halves else ""
        raise ValueError(
            "auto finds no variables of a Slurm array or step, an MPI launcher, a Kubernetes Indexed Job, torchrun or "
            f"a worker of MindSpore's dynamic cluster{lone}; pass --shard I/N"
        )
    if len({claim.share for claim in claims}) > 1:
        shares = " but ".join(f"{claim.share.number}/{claim.share.runs} by {claim.names}" for claim in claims)
        raise ValueError(f"auto finds {shares}; pass --shard I/N")
    return claims[0].share


class _Claim(NamedTuple):
    """A share and its variables."""

    share: Share
    names: str


def _launched(environment: Mapping[str, str]) -> Iterator[_Claim]:
    """The share of the first launcher with a variable of its own."""
    if "SLURM_ARRAY_TASK_ID" in environment:
        names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_COUNT")
        task, first, last, count = (_number(environment, name) for name in names)
        step = (last - first) // (count - 1) if count > 1 else 1
        if step < 1 or first + step * (count - 1) != last or (task - first) % step:
            raise ValueError(f"tasks {first} to {last} of the Slurm array are not evenly numbered; pass --shard I/N")
        yield _Claim(_checked((task - first) // step, count), "SLURM_ARRAY_TASK_ID")
        return
    for index, count_name in _LAUNCHERS:
        if index in environment:
            share = _checked(_number(environment, index), _number(environment, count_name))
            yield _Claim(share, f"{index} and {count_name}")
            return


def _set_elsewhere(environment: Mapping[str, str]) -> Iterator[_Claim]:
    """Shares of pairs of variables that many programs set; only complete pairs."""
    for index, count_name in _RANKS:
        numbers = [environment.get(name, "") for name in (index, count_name)]
        other_role = index == "MS_NODE_ID" and environment.get("MS_ROLE", _WORKER) != _WORKER
        if all(_NUMBER.fullmatch(text) for text in numbers) and not other_role:
            names = f"{index} and {count_name}"
            try:
                yield _Claim(_checked(int(numbers[0]), int(numbers[1])), names)
            except ValueError as error:
                raise ValueError(f"{names}: {error}") from error


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not _NUMBER.fullmatch(text):
        problem = f"is {text!r}" if text else "is not set"
        raise ValueError(f"auto needs {name}, which {problem}")
    return int(text)


def _checked(index: int, count: int) -> Share:
    if not 0 < count <= _MAX_RUNS or not 0 <= index < count:
        example = count if 0 < count <= _MAX_RUNS else 4
        raise ValueError(
            f"{index}/{count} is no shard: they are counted from 0, such as 0/{example} to {example - 1}/{example}"
        )
    return Share(index, count)
