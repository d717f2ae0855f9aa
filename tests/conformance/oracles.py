"""Other libraries as oracles: each works in a process and an environment of its own.

An *environment* is a virtual environment that `make conformance` makes. Where one is not there, the tests that ask it
skip and say so. What the programs in `workers` take and answer stands there.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.corpus import ROOT

Job = Mapping[str, Any]

#: Of `mindformers`, each in a directory of its own in one environment.
MINDFORMERS = ("1.8.0", "1.9.0", "2.0.0", "2.1.0")
#: Of MindSpore: that of the first environment, and the one that has `mindformers` beside it.
MINDSPORE = ("2.7.0", "2.10.0")

_MINDFORMERS_HOME = ROOT / ".venv-conformance-mindformers"
_TRANSFORMERS_HOME = ROOT / ".venv-conformance-transformers"
_MEGATRON_HOME = ROOT / ".venv-conformance-megatron"


def mindformers(version: str, jobs: Sequence[Job]) -> list[Any]:
    """What one version of MindFormers made of these jobs."""
    directory = _MINDFORMERS_HOME / "mindformers" / version
    if not directory.is_dir():
        pytest.skip(f"needs MindFormers {version}: run `make conformance`")
    return _ask(_python_of(_MINDFORMERS_HOME), "mindformers", jobs, directory)


def mindformers_names(version: str, jobs: Sequence[Job]) -> list[Any]:
    """What one version of MindFormers made of names and packed tensors."""
    directory = _MINDFORMERS_HOME / "mindformers" / version
    if not directory.is_dir():
        pytest.skip(f"needs MindFormers {version}: run `make conformance`")
    return _ask(_python_of(_MINDFORMERS_HOME), "mindformers_names", jobs, directory)


def mindspore(version: str, jobs: Sequence[Job]) -> list[Any]:
    """What one version of MindSpore made of these jobs."""
    return _ask(_python_with_mindspore(version), "mindspore", jobs)


def compiler(version: str, job: Job) -> Any:
    """What the compiler of one version of MindSpore made of one rank's job."""
    (answer,) = _ask(_python_with_mindspore(version), "compiler", [job])
    return answer


def transformers(jobs: Sequence[Job]) -> list[Any]:
    """What Hugging Face's library made of these jobs."""
    return _ask(_python_of(_TRANSFORMERS_HOME), "transformers", jobs)


def torch_checkpoints(jobs: Sequence[Job], beside_megatron: bool = False) -> list[Any]:
    """What PyTorch's distributed checkpoints made of these jobs, in the environment of Megatron-Core if asked."""
    home = _MEGATRON_HOME if beside_megatron else _TRANSFORMERS_HOME
    return _ask(_python_of(home), "torch_checkpoints", jobs)


def quantised(jobs: Sequence[Job]) -> list[Any]:
    """What the libraries that define quantised weights made of these jobs."""
    return _ask(_python_of(_TRANSFORMERS_HOME), "quantised", jobs)


def has_megatron(version: str) -> bool:
    """Whether a version of Megatron-Core is installed."""
    return (_MEGATRON_HOME / "megatron" / version).is_dir()


def megatron(version: str, jobs: Sequence[Job]) -> list[Any]:
    """What one version of Megatron-Core made of these jobs."""
    python = _python_of(_MEGATRON_HOME)
    if not has_megatron(version):
        pytest.skip(f"needs Megatron-Core {version}, which does not install here")
    process = _started(python, "megatron", _MEGATRON_HOME / "megatron" / version)
    assert process.stdin and process.stdout
    print(json.dumps(jobs), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    assert answer, f"Megatron-Core {version} ended with {process.wait()}"
    answers: list[Any] = json.loads(answer)
    return answers


@cache
def _started(python: Path, worker: str, argument: Path) -> subprocess.Popen[str]:
    """A worker that takes requests until this process ends."""
    words = [str(python), "-m", f"tests.conformance.workers.{worker}", str(argument)]
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    atexit.register(process.kill)
    return process


def done(answers: Sequence[Any]) -> list[Any]:
    """The answers to jobs that all have to succeed."""
    for answer in answers:
        assert "error" not in answer, answer["error"]
    return [answer["done"] for answer in answers]


def _python_with_mindspore(version: str) -> Path:
    if version != MINDSPORE[0]:
        return _python_of(_MINDFORMERS_HOME)
    if find_spec("mindspore") is None:
        pytest.skip("needs MindSpore: run `make conformance`")
    return Path(sys.executable)


def _python_of(environment: Path) -> Path:
    if "RESHARD_CONFORMANCE" not in os.environ:
        pytest.skip("asks another library: run `make conformance`")
    # .ci/venv writes it when everything is installed.
    if not (environment / ".reshard--").exists():
        pytest.skip(f"{environment.name} could not be made, or was not: see what `make` said")
    return environment / "bin" / "python"


def _ask(python: Path, worker: str, jobs: Sequence[Job], *arguments: Path) -> list[Any]:
    words = [str(python), "-m", f"tests.conformance.workers.{worker}", *map(str, arguments)]
    with TemporaryDirectory() as logs:
        # Of more than eight ranks MindFormers saves only on disks that all machines are known to share.
        reference = {"HF_HUB_OFFLINE": "1", "LOG_MF_PATH": logs, "LOCAL_DEFAULT_PATH": logs, "SHARED_PATHS": "/"}
        process = subprocess.run(
            words,
            input=json.dumps(jobs),
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=600,
            env={**os.environ, **reference},
        )
    assert process.returncode == 0, f"{words} gave {process.returncode}:\n{process.stderr[-4000:]}"
    answers: list[Any] = json.loads(process.stdout)
    assert len(answers) == len(jobs)
    return answers
