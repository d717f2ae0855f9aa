"""Writing SVG: elements as text, escaped, and a document that suits light and dark pages.

Classes name the colours, each with a light and a dark value, because an SVG in a page follows
the reader's preference. The document paints its own background, so it is legible even if
page and preference differ. Lengths are pixels.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Mapping

from reshard.text.messages import printable

FONT_SIZE = 12
LINE_HEIGHT = 17
#: Upper estimate of the width of a character at `FONT_SIZE`.
CHARACTER_WIDTH = 6.6

#: Class: painted property, colour on a light page, colour on a dark one.
_COLOURS = {
    "page": ("fill", "#ffffff", "#0d1117"),
    "ink": ("fill", "#1f2328", "#e6edf3"),
    "soft": ("fill", "#59636e", "#9198a1"),
    "paper": ("fill", "#ffffff", "#0d1117"),
    "line": ("stroke", "#b6bfc8", "#4d555e"),
}

Colours = Mapping[str, tuple[str, str, str]]


def element(name: str, *children: str, **attributes: str | float | None) -> str:
    """An element as text.

    Args:
        name: the element's name.
        children: its content, from other functions of this module.
        attributes: their values, escaped here; ``font_size`` becomes ``font-size`` and ``class_``
            becomes ``class``; None omits the attribute.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            value_text = f"{value:.6g}" if isinstance(value, (int, float)) else _escaped(value)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{value_text}"')
    start = " ".join(words)
    return f"<{start}>{''.join(children)}</{name}>" if children else f"<{start}/>"


def text(x: float, y: float, words: str, class_: str = "ink", **attributes: str | float | None) -> str:
    """One line of text whose baseline starts at (x, y), or has its ``text_anchor`` there."""
    return element("text", _escaped(words), x=x, y=y, class_=class_, **attributes)


def paragraph(
    x: float, y: float, words: str, width: float, class_: str = "ink", **attributes: str | float | None
) -> tuple[list[str], float]:
    """Text in lines of about ``width``, and the baseline of the next line."""
    lines = textwrap.wrap(words, max(10, int(width / CHARACTER_WIDTH))) or [""]
    elements = [text(x, y + LINE_HEIGHT * number, line, class_, **attributes) for number, line in enumerate(lines)]
    return elements, y + LINE_HEIGHT * len(lines)


def rectangle(
    x: float, y: float, width: float, height: float, class_: str, title: str | None = None, **attributes: float
) -> str:
    """A rectangle; a pointer on it shows its title."""
    children = [] if title is None else [element("title", _escaped(title))]
    return element("rect", *children, x=x, y=y, width=width, height=height, class_=class_, **attributes)


def document(width: float, height: float, title: str, body: Iterable[str], colours: Colours | None = None) -> bytes:
    """A whole SVG file, UTF-8.

    Args:
        width: width of the picture.
        height: height of the picture.
        title: description, for readers who cannot see the picture.
        body: its elements.
        colours: more classes: painted property, colour on light and on dark pages.
    """
    classes = {**_COLOURS, **(colours or {})}
    light = "".join(f".{name}{{{painted}:{colour}}}" for name, (painted, colour, _) in classes.items())
    dark = "".join(f".{name}{{{painted}:{colour}}}" for name, (painted, _, colour) in classes.items())
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
