"""``nn.Graph``: one training step as one object, with its config and settings of its modules."""

from .config import GraphConfig
from .graph import Graph
from .graph_module import GraphModule

__all__ = ["Graph", "GraphConfig", "GraphModule"]
