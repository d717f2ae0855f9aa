"""Requests on standard input, results on standard output, whatever the libraries print."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np

Job = dict[str, Any]


def serve(work: Callable[[Job], Any]) -> None:
    """Answer a list of jobs with a list of what `work` made of them.

    An exception that `work` raises is the answer to its job: ``{"error": "ValueError: ..."}``.
    """
    answers = _answers()
    json.dump(_worked(work, json.load(sys.stdin)), answers)
    answers.close()


def serve_lines(work: Callable[[Job], Any]) -> None:
    """Answer a list of jobs per line until the input ends: for programs that start slowly."""
    answers = _answers()
    for line in sys.stdin:
        print(json.dumps(_worked(work, json.loads(line))), file=answers, flush=True)


def _answers() -> TextIO:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _worked(work: Callable[[Job], Any], jobs: list[Job]) -> list[Any]:
    results: list[Any] = []
    for job in jobs:
        try:
            results.append({"done": work(job)})
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
    return results


def described(array: Any) -> dict[str, Any]:
    """Shape and hash of the bytes of a NumPy array."""
    return {"shape": list(array.shape), "sha256": hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}
