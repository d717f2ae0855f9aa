"""A run that continues until a test ends it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.corpus import ROOT
from tests.running import Argument

_CODE = """
import sys, time
from reshard.execute import writing
def commit(self):
    print("here", flush=True)
    time.sleep(600)
writing.TargetWriter.commit = commit
from reshard.cli.main import main
main()
"""


@contextmanager
def live_run(words: Sequence[Argument]) -> Iterator[None]:
    """A command that is about to finish its first target, until it is killed."""
    typed = [sys.executable, "-c", _CODE, *map(str, words)]
    with subprocess.Popen(typed, stdout=subprocess.PIPE, text=True, cwd=ROOT) as live:
        try:
            assert live.stdout is not None and live.stdout.readline().strip() == "here"
            yield
        finally:
            live.kill()
