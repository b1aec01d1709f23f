"""``nn.Graph``: one training step as one object, with the settings of its modules and its
config."""

from .config import GraphConfig
from .graph import Graph
from .graph_module import GraphModule

__all__ = ["Graph", "GraphConfig", "GraphModule"]
