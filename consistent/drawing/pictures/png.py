"""Rendering of a drawing as PNG by matplotlib, an optional dependency."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from .drawing import INK, Box, Drawing

_DPI = 100  # pixels per inch: a font of n pixels has n * 72 / 100 points
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def png(drawing: Drawing, path: Path) -> bytes:
    """Return ``drawing`` as a PNG file.

    It has the colours for white paper, and twice the drawing's size in pixels. ``path`` only names
    the file in the error message.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        figure: Any = import_module("matplotlib.figure")
        patches: Any = import_module("matplotlib.patches")
    except ImportError as error:
        raise ImportError(
            f"save: {path.name} is a PNG, and those are made by matplotlib, which is not installed "
            "here. Install it (pip install matplotlib), or save the picture as SVG: "
            f'.save("{path.stem}.svg").'
        ) from error
    sheet = figure.Figure(figsize=(drawing.width / _DPI, drawing.height / _DPI), dpi=_DPI)
    axes = sheet.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)  # matplotlib's y axis points up, ours down
    axes.axis("off")
    for shape in drawing.shapes:
        if isinstance(shape, Box):
            _add_box(axes, patches.Rectangle, shape)
        else:
            axes.text(
                shape.x, shape.y, shape.text.replace("$", r"\$"),
                fontsize=shape.size * 72 / _DPI, color=_light_colour(shape.fill),
                ha=_ANCHORS[shape.anchor], va="baseline",
                fontweight="bold" if shape.bold else "normal",
            )  # fmt: skip
    buffer = BytesIO()
    sheet.savefig(buffer, format="png", dpi=2 * _DPI, facecolor=INK["paper"][0])
    return buffer.getvalue()


def _add_box(axes: Any, rectangle: Callable[..., Any], shape: Box) -> None:
    """Draw a box on matplotlib's ``axes``, with stripes above its colour if it has any."""
    place = (shape.x, shape.y), shape.width, shape.height
    style = {"facecolor": _light_colour(shape.fill), "edgecolor": _light_colour(shape.edge)}
    axes.add_patch(rectangle(*place, linewidth=0.8, **style))
    if shape.striped:
        stripes = {"hatch": "////", "facecolor": "none", "edgecolor": "#ffffff99"}
        axes.add_patch(rectangle(*place, linewidth=0, **stripes))


def _light_colour(name: str) -> str:
    return INK[name][0] if name in INK else name or "none"
