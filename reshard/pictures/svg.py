"""Writing SVG: elements as text, escaped, and a document that suits light and dark pages.

Colours are named by classes, each with a light and a dark value, because an SVG in a page follows
the reader's preference by itself. The document paints its own background, so it stays legible where
page and preference differ. Lengths are pixels.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Mapping
from typing import Optional, Union

from reshard.text.wording import printable

FONT_SIZE = 12
LINE_HEIGHT = 17
#: About the width of a character at `FONT_SIZE`, on the wide side.
CHARACTER_WIDTH = 6.6

#: Class: what it paints, colour on a light page, colour on a dark one.
_COLOURS = {
    "page": ("fill", "#ffffff", "#0d1117"),
    "ink": ("fill", "#1f2328", "#e6edf3"),
    "soft": ("fill", "#59636e", "#9198a1"),
    "paper": ("fill", "#ffffff", "#0d1117"),
    "line": ("stroke", "#b6bfc8", "#4d555e"),
}

Colours = Mapping[str, tuple[str, str, str]]


def element(name: str, *children: str, **attributes: Union[str, float, None]) -> str:
    """An element as text.

    Args:
        name: the element's name.
        children: its content, as other functions here return it.
        attributes: their values, escaped here; ``font_size`` stands for ``font-size`` and ``class_``
            for ``class``; None leaves one out.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            said = f"{value:.6g}" if isinstance(value, (int, float)) else _escaped(value)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{said}"')
    start = " ".join(words)
    return f"<{start}>{''.join(children)}</{name}>" if children else f"<{start}/>"


def text(x: float, y: float, words: str, class_: str = "ink", **attributes: Union[str, float, None]) -> str:
    """One line of text whose baseline begins at (x, y), or is placed there by ``text_anchor``."""
    return element("text", _escaped(words), x=x, y=y, class_=class_, **attributes)


def paragraph(
    x: float, y: float, words: str, width: float, class_: str = "ink", **attributes: Union[str, float, None]
) -> tuple[list[str], float]:
    """Text folded to about ``width``, and the baseline of the line after it."""
    lines = textwrap.wrap(words, max(10, int(width / CHARACTER_WIDTH))) or [""]
    made = [text(x, y + LINE_HEIGHT * number, line, class_, **attributes) for number, line in enumerate(lines)]
    return made, y + LINE_HEIGHT * len(lines)


def rectangle(
    x: float, y: float, width: float, height: float, class_: str, title: Optional[str] = None, **attributes: float
) -> str:
    """A rectangle; its title shows where a pointer rests on it."""
    said = [] if title is None else [element("title", _escaped(title))]
    return element("rect", *said, x=x, y=y, width=width, height=height, class_=class_, **attributes)


def document(width: float, height: float, title: str, body: Iterable[str], colours: Optional[Colours] = None) -> bytes:
    """A whole SVG file, UTF-8.

    Args:
        width: of the picture.
        height: of the picture.
        title: what it shows, for readers that cannot see it.
        body: its elements.
        colours: per further class the property it sets and its colour on light and on dark pages.
    """
    known = {**_COLOURS, **(colours or {})}
    light = "".join(f".{name}{{{what}:{colour}}}" for name, (what, colour, _) in known.items())
    dark = "".join(f".{name}{{{what}:{colour}}}" for name, (what, _, colour) in known.items())
    style = (
        f"text{{font:{FONT_SIZE}px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}}"
        f".line{{fill:none}}{light}@media (prefers-color-scheme:dark){{{dark}}}"
    )
    inside = [element("title", _escaped(title)), element("style", style), rectangle(0, 0, width, height, "page"), *body]
    picture = element(
        "svg",
        "\n",
        *(f"{part}\n" for part in inside),
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {width:.6g} {height:.6g}",
        role="img",
    )
    return f"{picture}\n".encode()


def _escaped(words: str) -> str:
    return html.escape(printable(words))
