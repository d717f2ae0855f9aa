"""The picture of the README: slices of one tensor of the demo in 8 files, in 4 files, and in one."""

from __future__ import annotations

from collections.abc import Iterator

from docs.tools.pages import ROOT
from reshard.strategies import read_strategy

PLACE = ROOT / "docs" / "pictures"

_DEMO = ROOT / "fixtures" / "demo"
_TENSOR, _SHAPE = "head.weight", (96, 48)
_WIDTH, _HEIGHT = 900, 240
# An outline of the whole tensor in every file.
_CARD, _TALL, _TOP, _GAP = 42, 122, 78, 7
_THEMES = {
    "light": ("#1f2328", "#59636e", "#d1d9e0", "#0550ae", ("#cfe1f9", "#9cc1f3", "#5b96e5", "#0a3d8f")),
    "dark": ("#e6edf3", "#9aa4af", "#3d444d", "#79c0ff", ("#20508f", "#2a68b4", "#5b9df0", "#a5d0ff")),
}


def drawn() -> dict[str, bytes]:
    """The picture for light and for dark pages, by file name."""
    return {f"resharding-{name}.svg": _picture(*theme) for name, theme in _THEMES.items()}


def _picture(ink: str, soft: str, line: str, accent: str, shades: tuple[str, ...]) -> bytes:
    eighths, quarters = _rows("src_strategy.ckpt"), _rows("dst_strategy.ckpt")
    scale = (_TALL - 4) / _SHAPE[0]

    def title(x: float, text: str, below: str) -> Iterator[str]:
        yield f'<text x="{x}" y="30" fill="{ink}" class="title">{text}</text>'
        yield f'<text x="{x}" y="52" fill="{soft}" class="below">{below}</text>'

    def card(x: float, label: str, parts: list[tuple[int, int]]) -> Iterator[str]:
        yield f'<rect x="{x}" y="{_TOP}" width="{_CARD}" height="{_TALL}" rx="3" fill="none" stroke="{line}"/>'
        for start, stop in parts:
            shade = next(shade for shade, (first, end) in zip(shades, quarters) if first <= start < end)
            y, height = _TOP + 2 + start * scale, (stop - start) * scale
            yield (
                f'<rect x="{x + 2}" y="{y + 0.5:g}" width="{_CARD - 4}" height="{height - 1:g}" rx="1" fill="{shade}"/>'
            )
        yield f'<text x="{x + _CARD / 2}" y="{_TOP + _TALL + 18}" fill="{soft}">{label}</text>'

    x, middle = 16.0, _TOP + _TALL / 2
    body = [*title(x, "Saved by 8 ranks", "each file holds 1/8 of the tensor")]
    for rank, part in enumerate(eighths):
        body += card(x, f"rank {rank}", [part])
        x += _CARD + _GAP
    body += [
        f'<path d="M{x + 10} {middle}h84m-10-8l10 8-10 8" fill="none" stroke="{accent}" stroke-width="2"/>',
        f'<text x="{x + 52}" y="{middle - 14}" fill="{accent}" class="name">reshard</text>',
        f'<text x="{x + 52}" y="{middle + 24}" fill="{soft}">byte for byte</text>',
    ]
    x += 116
    body += title(x, "Loaded by 4 ranks", "each file holds 1/4")
    for rank, part in enumerate(quarters):
        body += card(x, f"rank {rank}", [part])
        x += _CARD + _GAP
    x += 40
    body += title(x, "or one file", "the whole tensor")
    body += card(x, "model", quarters)
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'role="img">\n<title>Slices of one tensor in 8 files become quarters in 4 files, or one whole tensor.</title>\n'
        "<style>text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;text-anchor:middle}"
        ".title{font-weight:600;font-size:15px;text-anchor:start}.below{font-size:13px;text-anchor:start}"
        ".name{font:14px ui-monospace,Menlo,Consolas,monospace}</style>\n"
    )
    return (text + "\n".join(body) + "\n</svg>\n").encode()


def _rows(name: str) -> list[tuple[int, int]]:
    """The rows of the tensor that each rank of a strategy holds."""
    strategy = read_strategy(str(_DEMO / name))
    (stage,) = strategy.stages
    layout = stage.layouts[_TENSOR]
    return [layout.slice_box(_SHAPE, int(layout.slice_of_rank[rank]))[0] for rank in range(stage.device_count)]
