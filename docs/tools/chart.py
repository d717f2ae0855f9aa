"""The chart of the README, from what `python -m benchmarks against_others` measured in one run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from docs.tools.pages import ROOT

PLACE = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results" / "against_others.json"
TITLE = "Time and memory of reshard, MindSpore and torch, against a copy"

_WIDTH = 900
# Labels end, bars begin; bars of memory begin; the longest of each.
_LABELS, _BARS, _MEMORY = 200, 212, 670
_LONGEST, _LONGEST_MEMORY = 380, 150
_ROW, _HIGH = 23, 16
_THEMES = {
    "light": ("#1f2328", "#59636e", "#2468c4", "#c5cdd5"),
    "dark": ("#e6edf3", "#9aa4af", "#5b9df0", "#4a525b"),
}


def drawn() -> dict[str, bytes]:
    """The chart for light and for dark pages, by file name; none before the first measurement."""
    if not RESULTS.exists():
        return {}
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {f"benchmarks-{name}.svg": _chart(measured, *theme) for name, theme in _THEMES.items()}


def time_words(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}"


def memory_words(mib: int) -> str:
    return f"{mib} MiB" if mib < 1000 else f"{mib / 1024:.1f} GiB"


def _chart(measured: dict[str, Any], ink: str, soft: str, ours: str, grey: str) -> bytes:
    tools = measured["tables"][0]["rows"]
    slowest = max([1.0, *(tool["ratio"] for tool in tools)])
    largest = max(tool["memory, MiB"] for tool in tools)
    one = _BARS + _LONGEST / slowest

    def row(tool: dict[str, Any], y: float) -> Iterator[str]:
        mine = tool["tool"] == "reshard"
        fill, words, bold = (ours, ink, " class='bold'") if mine else (grey, soft, "")
        yield f'<text x="{_LABELS}" y="{y + 12}" text-anchor="end" fill="{words}"{bold}>{tool["tool"]}</text>'
        for x, part, text in (
            (_BARS, _LONGEST * tool["ratio"] / slowest, time_words(tool["ratio"])),
            (_MEMORY, _LONGEST_MEMORY * tool["memory, MiB"] / largest, memory_words(tool["memory, MiB"])),
        ):
            yield f'<rect x="{x}" y="{y}" width="{max(2.0, part):.1f}" height="{_HIGH}" rx="2" fill="{fill}"/>'
            # Beside the line of cp, not on it.
            end = x + max(2.0, part)
            end = one if x == _BARS and one - 40 < end < one + 2 else end
            yield f'<text x="{end + 9:.1f}" y="{y + 12}" fill="{ink}"{bold}>{text}</text>'

    body = [
        f'<text x="{_BARS}" y="24" fill="{ink}" class="bold">Time; a plain copy (cp) is 1</text>',
        f'<text x="{_MEMORY}" y="24" fill="{ink}" class="bold">Peak memory</text>',
    ]
    y = 40.0
    for kind, group in itertools.groupby(tools, lambda tool: tool["kind"]):
        body.append(f'<text x="16" y="{y + 14}" fill="{ink}" class="bold">{kind}</text>')
        y += 26
        for tool in group:
            body += row(tool, y)
            y += _ROW
        y += 12
    body += [
        f'<path d="M{one:.1f} 36V{y - 6}" stroke="{ink}" stroke-dasharray="3 3"/>',
        f'<text x="{one + 5:.1f}" y="46" fill="{soft}">cp</text>',
        f'<text x="16" y="{y + 14}" fill="{soft}">Shorter is better. Geometric means of rounds on the same '
        f"input, start-up included; {measured['cores']} cores, files in memory, {measured['date']}."
        "</text>",
    ]
    height = round(y + 28)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img">\n<title>{TITLE}</title>\n'
        "<style>text{font:12.5px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
        ".bold{font-weight:600}</style>\n"
    )
    return (head + "\n".join(body) + "\n</svg>\n").encode()
