"""Picture of a tensor on its ranks."""

from __future__ import annotations

from ..drawing.pictures.drawing import Drawing
from ..drawing.pictures.picture import Picture
from ..spec import TensorSpec
from .tensor_drawing import tensor_drawing
from .tensor_text import tensor_text


class TensorPicture(Picture):
    """Picture of the part of a tensor that each rank holds, made from its spec.

    Equal pieces have one colour, and addends are striped.
    """

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec

    def text(self, *, colour: bool = False, width: int = 80, blocks: bool = True) -> str:
        return tensor_text(self.spec, colour, width, blocks)

    def drawing(self) -> Drawing:
        return tensor_drawing(self.spec)
