"""Base class of pictures, which show as text in a terminal and as a drawing in a file or
notebook."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

from ..files import write
from .colours import shows_blocks, shows_colours
from .drawing import Drawing
from .png import png

_EXAMPLES = ('.save("picture.svg")', '.save("picture.png")')


class Picture:
    """Base class of what ``visualize`` and other functions return to be looked at.

    ``print`` shows its text, a notebook shows its drawing, and ``save`` writes a file. Text has
    colours where standard output is a terminal and NO_COLOR is not set.
    """

    def text(self, *, colour: bool = False, width: int = 80, blocks: bool = True) -> str:
        """Return the picture as text, at most ``width`` characters wide.

        Args:
            colour: whether to add terminal colour codes.
            width: in characters, 40 or more.
            blocks: whether characters beyond ASCII may be used.
        """
        raise NotImplementedError

    def drawing(self) -> Drawing:
        """Return the picture as boxes and text at positions."""
        raise NotImplementedError

    def svg(self) -> str:
        """Return the picture as a standalone SVG file."""
        return self.drawing().svg()

    def save(self, path: str | Path) -> Path:
        """Write the picture to ``path`` as SVG or PNG; missing folders are created.

        PNG needs matplotlib.

        Raises:
            ValueError: the name ends neither in .svg nor in .png.
            ImportError: the name ends in .png, and matplotlib is not installed.
        """
        target = Path(path)
        kind = target.suffix.lower()
        if kind not in (".svg", ".png"):
            raise ValueError(
                f"save: {str(path)!r} ends in {target.suffix or 'no suffix'!r}, and a picture is "
                f"an SVG or a PNG. Write {' or '.join(_EXAMPLES)}."
            )
        drawing = self.drawing()
        return write(target, drawing.svg() if kind == ".svg" else png(drawing, target))

    def __str__(self) -> str:
        width = max(40, shutil.get_terminal_size().columns)
        return self.text(colour=shows_colours(), width=width, blocks=shows_blocks())

    __repr__ = __str__

    def _repr_svg_(self) -> str:  # called by notebooks
        return self.svg()


def wrapped(text: str, width: int) -> list[str]:
    """Return ``text`` as lines of at most ``width`` characters; all but the first are indented."""
    return textwrap.wrap(text, width, subsequent_indent="  ") or [""]
