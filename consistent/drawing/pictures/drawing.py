"""Drawings made of boxes and text at positions, independent of the output format (SVG or PNG).

Lengths are in pixels, from the left and from the top. Colours are ``#rrggbb`` or one of the names
in ``INK``, which differ in light and dark mode.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from mirrored.readable import escape_invisible

INK = {
    # name: (light, dark)
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#656d76", "#8d96a0"),
    "line": ("#afb8c1", "#484f58"),
    "empty": ("#f0f2f5", "#1c2129"),
}
FONT = "ui-sans-serif,system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"


@dataclass(frozen=True, slots=True)
class Box:
    """Rectangle of a drawing, with its left upper corner at (x, y).

    Args:
        fill, edge: colours of the inside and of the edge; "" for none.
        striped: whether to draw stripes over it, which mark addends of a sum.
        title: tooltip in a browser.
    """

    x: float
    y: float
    width: float
    height: float
    fill: str = ""
    edge: str = ""
    striped: bool = False
    title: str = ""  # tooltip in a browser


@dataclass(frozen=True, slots=True)
class Words:
    """Line of text in a drawing.

    ``y`` is its base line, and ``x`` the position of its "start", "middle" or "end", as ``anchor``
    says.
    """

    x: float
    y: float
    text: str
    size: float = 12
    fill: str = "ink"
    anchor: str = "start"
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes and texts on a sheet of ``width`` x ``height`` pixels; later shapes cover earlier ones.

    ``name`` describes it for screen readers.
    """

    width: float
    height: float
    shapes: Sequence[Box | Words]
    name: str = "picture"

    def svg(self) -> str:
        """Return the drawing as a standalone SVG file, in light or dark as the viewer prefers."""
        light, dark = (
            ";".join(f"--{name}:{both[i]}" for name, both in INK.items()) for i in (0, 1)
        )
        css = f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
        return self._svg(' xmlns="http://www.w3.org/2000/svg"', f"<style>{css}</style>\n")

    def inside(self) -> str:
        """Return the drawing as SVG to be embedded in an HTML page.

        The page must define the colours in ``INK`` as CSS variables.
        """
        return self._svg("", "")

    def _svg(self, attributes: str, css: str) -> str:
        size = f"{self.width:g} {self.height:g}"
        return (
            f'<svg{attributes} viewBox="0 0 {size}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img" '
            f'aria-label="{_escaped(self.name)}" font-family="{FONT}">\n'
            f"{css}"
            '<defs><pattern id="stripes" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="2.5" height="6" fill="#ffffff" '
            'fill-opacity=".55"/></pattern></defs>\n'
            f'<rect width="{self.width:g}" height="{self.height:g}" style="fill:var(--paper)"/>\n'
            + "\n".join(map(_shape_svg, self.shapes))
            + "\n</svg>\n"
        )


def _shape_svg(shape: Box | Words) -> str:
    if isinstance(shape, Words):
        weight = ' font-weight="600"' if shape.bold else ""
        return (
            f'<text x="{shape.x:.6g}" y="{shape.y:.6g}" font-size="{shape.size:g}" '
            f'text-anchor="{shape.anchor}" style="fill:{_css_colour(shape.fill)};white-space:pre"'
            f"{weight}>{_escaped(shape.text)}</text>"
        )
    place = (
        f'x="{shape.x:.6g}" y="{shape.y:.6g}" width="{shape.width:.6g}" height="{shape.height:.6g}"'
    )
    style = f"fill:{_css_colour(shape.fill)}" + (
        f";stroke:{_css_colour(shape.edge)}" if shape.edge else ""
    )
    title = f"<title>{_escaped(shape.title)}</title>" if shape.title else ""
    rect = f'<rect {place} style="{style}">{title}</rect>'
    return rect + (f'<rect {place} fill="url(#stripes)"/>' if shape.striped else "")


def _escaped(text: str) -> str:
    return html.escape(escape_invisible(text))


def _css_colour(name: str) -> str:
    return f"var(--{name})" if name in INK else name or "none"
