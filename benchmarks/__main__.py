"""Run every benchmark, or those named, and write their files in benchmarks/results and the page docs/benchmarks.md."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import sys
from collections.abc import Sequence

import numpy as np

from benchmarks.measure import Section
from docs.tools import measured
from reshard._version import __version__


def main(names: Sequence[str]) -> None:
    """Measure, print and write; a script that found nothing to measure leaves its file as it is."""
    for name in names or measured.SCRIPTS:
        stamp = _stamp()
        section: Section = importlib.import_module(f"benchmarks.{name}").measure()
        if not any(table["rows"] for table in section.results["tables"]):
            continue
        measured.RESULTS.mkdir(exist_ok=True)
        text = json.dumps({**stamp, **section.results}, indent=1, ensure_ascii=False)
        (measured.RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    measured.PAGE.write_text(measured.page(), encoding="utf-8")


def _stamp() -> dict[str, str | int | float]:
    """When and where, before a script runs."""
    return {
        "date": str(datetime.date.today()),
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "reshard": __version__,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
