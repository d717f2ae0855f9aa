"""Where it is said how a strategy was made that no compile has written."""

from __future__ import annotations

import os

RECORD = ".made"
"""Ends the name of the file beside a made strategy that says how it was made.

It holds JSON, but is not named so: MindSpore refuses to merge a directory with both .ckpt and .json files."""

RANK = "{rank}"
"""Stands for a stage's first rank in the path of a made strategy's files."""

ENDINGS = (".ckpt", ".json")


def record_path(out: str) -> str:
    """Where it is said how a made strategy was made.

    Args:
        out: its file, its directory, or a path with `RANK` in it, as it was typed.
    """
    if out.endswith(ENDINGS) and RANK not in out:
        return out + RECORD
    return os.path.join(os.path.dirname(out) if RANK in out else out, "strategy" + RECORD)


def record_paths(strategy: str) -> list[str]:
    """Where the record of a strategy lies that may have been made.

    Args:
        strategy: its file, or the directory of its stages' files.
    """
    beside = os.path.join(os.path.dirname(strategy), "strategy" + RECORD)
    return list(dict.fromkeys((record_path(strategy), beside)))
