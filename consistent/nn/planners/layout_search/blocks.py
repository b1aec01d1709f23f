"""Detection of repeated blocks, such as the layers of a transformer.

The integer program has one set of variables for all equal blocks.

Layers of a model are sibling modules whose names differ in a number. They count as blocks if there
are several, each has several matrices, and each calls equal ops in an equal order: the same op on
the same shapes with the same arguments. (The layers of an MLP are not blocks: of two linear layers
in a row one is split by columns, the other by rows.)
"""

from __future__ import annotations

import re
from collections.abc import Hashable

from ....graph.global_ops import OP, Op, Value
from .program import RecordedStep

_MIN_OPS = 64  # a smaller program is solved as it is
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def node_block_keys(program: RecordedStep) -> list[Hashable]:
    """Return a key for each node of the layout problem; nodes that must choose equally share a key.

    The nodes are the inputs, parameters and buffers of the program, then its ops. Corresponding
    nodes of equal blocks (layers of a model) share their key, so they are solved once. The key is
    None for a node that is in no block.
    """
    inputs = [value for value in program.values if value.kind != OP]
    ops = program.ops
    node_keys: list[Hashable] = [None] * (len(inputs) + len(ops))
    if len(ops) < _MIN_OPS:
        return node_keys
    blocks = _blocks(program)
    for index, value in enumerate(inputs):
        block = _block_of(value.name, blocks)
        if block is not None:
            node_keys[index] = blocks[block], value.name[len(block) :]
    op_counts: dict[str, int] = {}
    for index, op in enumerate(ops, len(inputs)):
        block = _block_of(op.module, blocks)
        if block is not None:
            op_counts[block] = op_counts.get(block, 0) + 1
            node_keys[index] = blocks[block], op_counts[block]
    return node_keys


def _blocks(program: RecordedStep) -> dict[str, Hashable]:
    """Return the modules that are blocks, as name -> key of its kind of block.

    Only modules with at least one equal module are blocks; equal ones have the same key:
    ``{"h.0": ("h.*", 0), "h.1": ("h.*", 0)}``.
    """
    families: dict[str, dict[str, Hashable]] = {}
    for name in _numbered_modules(program):
        text = _NUMBER.sub("*", name)
        families.setdefault(text, {})[name] = _content_key(program, name)
    blocks: dict[str, Hashable] = {}
    for text, members in families.items():
        counts: dict[Hashable, int] = {}
        for content in members.values():
            counts[content] = counts.get(content, 0) + 1
        kinds = {content: kind for kind, content in enumerate(counts)}
        for name, content in members.items():
            # Shorter names come first, so a module inside a block is not a block of its own.
            if content is not None and counts[content] > 1 and _block_of(name, blocks) is None:
                blocks[name] = text, kinds[content]
    return blocks


def _numbered_modules(program: RecordedStep) -> list[str]:
    """Return the names of modules that end in a number, such as ``layers.0``, outermost first."""
    names: dict[str, None] = {}
    for op in program.ops:
        parts = op.module.split(".")
        for n, part in enumerate(parts, 1):
            if part.isdigit():
                names[".".join(parts[:n])] = None
    return sorted(names, key=lambda name: (name.count("."), list(names).index(name)))


def _content_key(program: RecordedStep, block: str) -> Hashable:
    """Return a key of what a module runs and holds; equal modules have equal keys.

    None if it has fewer than two matrices, and so is too small to be a block.
    """
    inside = [op for op in program.ops if _is_in(op.module, block)]
    tensors = [value for value in program.values if value.name and _is_in(value.name, block)]
    if sum(value.spec.ndim > 1 for value in tensors) < 2:
        return None
    return tuple(map(_op_key, inside)), tuple(_tensor_key(value, block) for value in tensors)


def _op_key(op: Op) -> Hashable:
    """Return a key of an op that is equal for the same op on the same shapes and arguments."""
    # Equal calls share one Call, which the program keeps alive.
    return op.name, id(op.call), op.row is None


def _tensor_key(value: Value, block: str) -> Hashable:
    """Return a key of a tensor that is equal for corresponding tensors of equal blocks."""
    return value.name[len(block) :], value.spec, value.kind, value.tracked


def _block_of(name: str, blocks: dict[str, Hashable]) -> str | None:
    """Return the block that has the module or tensor ``name``, or None: ``h.0.fc -> h.0``."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return next((prefix for prefix in prefixes if prefix in blocks), None)


def _is_in(name: str, block: str) -> bool:
    return name == block or name.startswith(block + ".")
