"""Extraction of parts of a recorded graph as modules of their own, to compile or capture them."""

from __future__ import annotations

import linecache
import weakref

import torch
from torch.fx import Graph, GraphModule, Node, graph_module

from .opaque import ORDERED_OPS


def part_of(
    nodes: list[Node],
    input_nodes: list[Node],
    output_nodes: list[Node],
    constants: dict[str, torch.Tensor],
) -> GraphModule:
    """Return a module that runs some consecutive nodes of a recorded graph.

    It is used for the segments between graph breaks, and for what a CUDA graph captures.

    Args:
        nodes: the nodes to run.
        input_nodes: nodes before these, whose values are the inputs of the module.
        output_nodes: those of ``nodes`` whose values are the outputs.
        constants: tensors of the whole graph by name, of which the module gets those that it reads.
    """
    graph, copies = Graph(), {}
    for n in input_nodes:
        copies[n] = graph.placeholder(n.name)
        copies[n].meta.update(n.meta)
    for n in nodes:
        copies[n] = graph.node_copy(n, copies.__getitem__)
    graph.output(tuple(copies[n] for n in output_nodes))
    graph.eliminate_dead_code(
        lambda n: n.target in ORDERED_OPS or bool(n.meta.get("written")) or n.is_impure()
    )
    constant_names = {n.target for n in graph.nodes if n.op == "get_attr"}
    root = torch.nn.Module()
    for name in constant_names:
        root.register_buffer(name, constants[name])
    return module_of(root, graph)


def module_of(root: torch.nn.Module, graph: Graph) -> GraphModule:
    """Return a ``GraphModule`` of ``graph`` whose generated source is freed with it.

    Torch keeps the source of every ``GraphModule`` until the process ends, which adds up in a step
    whose sizes grow. ``root`` holds the tensors to which the graph's ``get_attr`` nodes refer.
    """
    module = GraphModule(root, graph)
    name = module.forward.__func__.__code__.co_filename
    if name.startswith("<eval_with_key>"):  # names of this form are unique to one module
        weakref.finalize(module, _drop_source, name).atexit = False
    return module


def _drop_source(name: str) -> None:
    graph_module._loader.eval_cache.pop(name, None)
    linecache.cache.pop(name, None)
