"""Origins of the tensors that a step returns or assigns, while it is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from .sources import Source


@dataclass(frozen=True)
class NodePlace:
    """Origin of a tensor that a step returns or assigns: an fx node, an argument, or a source.

    It is used during the recording. The finished program has a ``program.Place`` instead, with the
    number of a value in place of the node.

    Args:
        node: fx node that computed the value. With ``spec``, the value is this rank's shard of a
            global tensor of this spec.
        argument: index of the tensor among the tensors in the step's arguments.
        source: a ``Source``, such as a module's attribute, that holds the tensor.
    """

    node: Node | None
    spec: Any = None
    argument: int | None = None
    source: Any = None


Writes = list[tuple[Source, NodePlace | None]]  # assignments to sources; None assigns None
