"""One training step as one object: ``nn.Graph``, its modules and its config."""

from .config import GraphConfig
from .graph import Graph
from .graph_module import GraphModule

__all__ = ["Graph", "GraphConfig", "GraphModule"]
