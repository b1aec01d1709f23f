"""Pictures of a tensor on its ranks, of a model's parameters, and of a pipeline schedule.

```
tensor     holdings: what each rank holds      tensor_text    tensor_drawing
model      model_tree: parameters by module
schedule   pipeline/picture, which simulates its times
```

``drawing/pictures`` has the methods that all pictures share (text, svg, save), and their boxes,
lines and words.

A picture is made from specs. Nothing is communicated, and no value is read.
"""

from ..drawing.pictures.picture import Picture
from .visualize import visualize

__all__ = ["Picture", "visualize"]
