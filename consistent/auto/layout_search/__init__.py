"""The layouts of the global ops of a recorded step, chosen at once by integer programming.

``consistent.compile(step, layouts="auto")`` notes the ops (``compiled/layout_search``), asks here
for a choice for each, and records the step again with it. Parameters, inputs and results lie as
they do.
"""

from .choose import chosen

__all__ = ["chosen"]
