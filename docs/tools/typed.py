"""mypy on the Python examples of the pages: `python -m docs.tools.typed`, which `make check` runs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from docs.tools.pages import ROOT, blocks, pages

with tempfile.TemporaryDirectory() as place:
    files = []
    for page in pages():
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language == "python":
                # Lines have the numbers that they have in the page.
                files.append(Path(place, f"{page.stem.replace('-', '_')}_{block.start + 1}.py"))
                files[-1].write_text("\n" * block.start + block.text, encoding="utf-8")
    sys.exit(subprocess.run([sys.executable, "-m", "mypy", *files], cwd=ROOT, check=False).returncode)
