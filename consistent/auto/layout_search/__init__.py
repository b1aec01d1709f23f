"""Joint choice of the layouts of all ops of a recorded step, by integer programming.

``consistent.compile(step, layouts="auto")`` records the ops on global tensors
(``compiled/layout_search``), calls this package to choose the input and output layouts (the
signature) of each op, and records the step again with these choices. Parameters, inputs and results
of the step keep their layouts.
"""

from .choose import chosen

__all__ = ["chosen"]
