"""Print a plan as a table, with one line for entries that repeat in every block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mirrored.readable import on_one_line

from .layouts import CODEC_FIELDS, Border, Layouts, Nd, codecs_text, nd_text
from .names import group_by_block


def tensor_lines(
    tensors: Mapping[str, Layouts], shapes: Mapping[str, Sequence[int]], tied: Mapping[str, str]
) -> list[str]:
    """Return the table of a plan's tensors, one line for all blocks: ``h.{0-11}.w  12x  S(0)``.

    The columns for use, grad, step and codecs are left out if no tensor needs them.

    Args:
        tensors: name or pattern -> layouts.
        shapes: name -> logical shape, for a column if there are any.
        tied: further name of a tensor -> its name in ``tensors``.
    """
    aliases: dict[str, list[str]] = {}
    for alias, name in tied.items():
        aliases.setdefault(name, []).append(alias)
    keyed = {
        name: (layouts, tuple(shapes.get(name, ())), tuple(aliases.get(name, ())))
        for name, layouts in tensors.items()
    }
    all_plain = all(layouts.is_plain for layouts in tensors.values())
    heads = () if all_plain else ("used", "grad", "step")
    coded = [name for name in CODEC_FIELDS if any(getattr(x, name) for x in tensors.values())]
    rows = [("tensor", "", "shape", "lies", *heads, *(f"{name} by" for name in coded))]
    for text, names, (layouts, shape, other_names) in group_by_block(keyed):
        other_layouts = (layouts.use, layouts.grad, layouts.step)
        cells = [nd_text(nd) if nd != layouts.sbp else "" for nd in other_layouts]
        cells += [codecs_text(x) if (x := getattr(layouts, name)) else "" for name in coded]
        name = on_one_line(text + "".join(f" = {other}" for other in other_names))
        size = str(list(shape)) if shapes else ""
        rows.append(
            (name, _repeat_text(names), size, nd_text(layouts.sbp), *(() if all_plain else cells))
        )
    return columns(rows)


def border_lines(modules: Mapping[str, Border]) -> list[str]:
    """Return the table of a plan's borders: for each module, how its inputs and outputs are boxed.

    To box a tensor is to redistribute it to another layout.
    """
    keyed = {
        name: (_layouts_text(border.inputs), _layouts_text(border.outputs))
        for name, border in modules.items()
    }
    rows = [("module", "", "inputs boxed to", "outputs boxed to")]
    rows += [
        (on_one_line(text), _repeat_text(names), *sides)
        for text, names, sides in group_by_block(keyed)
    ]
    return columns(rows)


def border_text(name: str, border: Border) -> str:
    """Return a module's border as a part of a sentence: ``fc with outputs boxed to 0: B``."""
    sides = (("inputs", _layouts_text(border.inputs)), ("outputs", _layouts_text(border.outputs)))
    boxed = " and ".join(f"{side} boxed to {text}" for side, text in sides if text)
    return f"{name or 'the module'} with {boxed or 'nothing boxed'}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines of aligned columns, with the first row underlined."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * w for w in widths), *lines[1:]]


def _repeat_text(names: Sequence[str]) -> str:
    """Return the number of repetitions as text, ``12x``; empty for one."""
    return f"{len(names)}x" if len(names) > 1 else ""


def _layouts_text(layouts: Mapping[int | str, Nd]) -> str:
    """Return layouts by position or key as text: ``0: S(1), mask: B``."""
    return ", ".join(f"{key}: {nd_text(nd)}" for key, nd in layouts.items())
