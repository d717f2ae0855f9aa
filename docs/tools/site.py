"""Build the documentation as a site: ``python -m docs.tools.site [DIRECTORY [SOURCE]]``.

Needs the packages of the extra ``site``. Warnings are errors: a broken link, a page without a place in the contents.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def main(target: str = "build/site", source: str = str(_ROOT)) -> int:
    """Build the site.

    Args:
        target: directory of the site; existing pages are replaced.
        source: a clone, or a directory with the README and docs/ of one.
    """
    from sphinx.cmd.build import build_main

    state = str(Path(target) / ".doctrees")
    options = ["-q", "-W", "--keep-going", "-c", str(Path(source) / "docs/site"), "-d", state]
    return int(build_main([*options, source, target]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
