"""Origins of the tensors that a step returns or assigns, while it is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from .sources import Source


@dataclass(frozen=True)
class NodePlace:
    """Origin of a tensor that a step returns or assigns; one of three is given.

    It is used during the recording. The finished program has a ``program.Place`` instead, with a
    number in place of the node.

    Args:
        node: node of the value. With ``spec``, the value is a shard of a global tensor of this
            spec.
        argument: position of an argument of the step, which is itself the tensor.
        source: a ``Source`` whose tensor is the one.
    """

    node: Node | None
    spec: Any = None
    argument: int | None = None
    source: Any = None


Writes = list[tuple[Source, NodePlace | None]]  # assignments to sources; None assigns None
