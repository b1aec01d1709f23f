"""Pictures: a tensor on its ranks, a model's parameters and their bytes, a schedule of a pipeline.

```
tensor     holdings: what each rank holds      tensor_text    tensor_drawing
model      model_tree: parameters by module
schedule   pipeline/picture, which plays it
```

``drawing/pictures`` has what all can do (text, svg, save), and their boxes, lines and words.

A picture is made of specs. Nothing is communicated, and no value is read.
"""

from ..drawing.pictures.picture import Picture
from .visualize import visualize

__all__ = ["Picture", "visualize"]
