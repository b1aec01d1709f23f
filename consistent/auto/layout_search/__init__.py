"""Choice of the layouts of all global ops of a recorded step at once, by integer programming.

``consistent.compile(step, layouts="auto")`` notes the ops (``compiled/layout_search``), calls this
package to choose the signatures of each op, and records the step again with these. Parameters,
inputs and results keep their layouts.
"""

from .choose import chosen

__all__ = ["chosen"]
