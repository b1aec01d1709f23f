"""Pattern matching of the ops after a sum over ranks that the kernel of the sum can compute as well
(its epilogue).

```
%3 = reduce_scatter(%1)     sum
%4 = mul(%3, 0.5)           * scale
%5 = add(%4, %bias)         + bias
%6 = add(%5, %x)            + residual        = total, which others may read
%7 = gelu(%6)               activation
%8 = layer_norm(%7, ...)    norm
```

Each op is optional. Values between the ops must have no other reader, and nothing may write into
them, because the fused kernel does not return them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from ..fused.calls import Epilogue
from ..listing import is_item
from ..program import GRAPH_BREAK
from .norms import NORMS, Norm
from .trace import Trace, memory_of

_aten = torch.ops.aten
_MULTIPLICATIONS = (_aten.mul.Tensor, _aten.mul.Scalar)
_DIVISIONS = (_aten.div.Tensor, _aten.div.Scalar)
_REDUCE_SHARDS = torch.ops.consistent.reduce_shards
_WIDER_DTYPE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_SUMMED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EXTRA_INPUTS = ("bias", "residual", "weight", "norm_bias")


@dataclass
class EpilogueMatch:
    """Ops after a sum over ranks that one kernel can compute with it, and that kernel's arguments.

    The kernel computes total = scale * sum + bias + residual, and then norm(activation(total)).

    Args:
        last_node: the last matched node, whose value the kernel returns.
        total: the node of total; equal to ``last_node`` if there is no activation and no norm.
        epilogue: scale, activation and norm.
        extra_inputs: the tensors that the ops read in addition to the sum (bias, residual, weights
            of the norm), by name.
        names: the names of the ops, for reports and for comparison between ranks.
        dtype: dtype of the results, if it differs from that of the sum.
        returns_total: whether total is read elsewhere, so that the kernel must return it too.
        nodes: the nodes that the kernel replaces.
    """

    last_node: Node
    total: Node
    epilogue: Epilogue = field(default_factory=Epilogue)
    extra_inputs: dict[str, Node] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    returns_total: bool = False
    nodes: set[Node] = field(default_factory=set)


def nodes_until_next_message(trace: Trace, message: Node) -> Iterator[Node]:
    """Yield the nodes after ``message``, up to the next message or graph break.

    Only these may be fused with the message, since messages must keep their order.
    """
    node = message.next
    while node.op != "root" and node.target is not GRAPH_BREAK and not trace.is_ordered(node):
        yield node
        node = node.next


def match_epilogue(trace: Trace, message: Node, written: set[Any]) -> EpilogueMatch | None:
    """Return the ops after ``message``, a sum over ranks, that one kernel can compute with it.

    None: there are no such ops.

    Args:
        written: ``memory_of`` of all values into which ops of the graph write.
    """
    items = list(message.users)
    if (
        len(items) != 1
        or not items[0].meta["shape"]
        or items[0].meta["dtype"] not in _SUMMED_DTYPES
    ):
        return None
    matched = _EpilogueMatcher(trace, message, items[0], written).match_all()
    return matched if matched.names and matched.last_node.meta.get("contiguous") else None


class _EpilogueMatcher:
    """Matcher of the ops after the sum ``message``, one op at a time, in the kernel's order.

    ``item`` is the node of the result of the message.
    """

    def __init__(self, trace: Trace, message: Node, item: Node, written: set[Any]) -> None:
        self._trace, self._message, self._written = trace, message, written
        self._following_nodes = set(nodes_until_next_message(trace, message))
        self._match = EpilogueMatch(item, item)

    def match_all(self) -> EpilogueMatch:
        if self._match_reduce_shards():
            return self._match
        for step in (self._match_scale, self._match_bias, self._match_residual):
            step()
        self._match.total = self._match.last_node
        total = self._match.total
        if memory_of(total) not in self._written and total.meta.get("contiguous"):
            inside = self._match_activation() | self._match_norm()
            self._match.returns_total = bool(inside) and (
                total in self._trace.lasting or not set(total.users) <= inside
            )
        self._match_cast()
        return self._match

    # -- one op at a time --------------------------------------------------------------------------

    def _match_scale(self) -> None:
        node = self._only_user(self._match.last_node)
        if node is None or node.kwargs or len(node.args) != 2:
            return
        a, b = node.args
        number = b if a is self._match.last_node else a
        if not isinstance(number, int | float) or isinstance(number, bool):
            return
        if node.target in _MULTIPLICATIONS:
            self._extend_match(node, "scale", Epilogue(scale=float(number)))
        elif node.target in _DIVISIONS and a is self._match.last_node and number != 0:
            self._extend_match(node, "scale", Epilogue(scale=1 / number))

    def _match_bias(self) -> None:
        shape = self._match.last_node.meta["shape"]
        if len(shape) > 1:
            self._match_added_tensor("bias", shape[-1:])

    def _match_residual(self) -> None:
        self._match_added_tensor("residual", self._match.last_node.meta["shape"])

    def _match_added_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        last_node = self._match.last_node
        node = self._only_user(last_node)
        if node is None or node.target is not _aten.add.Tensor or node.kwargs:
            return
        addend = node.args[1] if node.args[0] is last_node else node.args[0]
        if addend is not last_node and self._can_be_input(addend, shape, node):
            self._extend_match(node, name, **{name: addend})

    def _match_activation(self) -> set[Node]:
        """Add an activation to the match if one follows, and return its nodes."""
        last_node = self._match.last_node
        activations = [
            node
            for node in last_node.users
            if node in self._following_nodes and _activation_name(node)
        ]
        if len(activations) != 1 or activations[0].args[0] is not last_node:
            return set()
        name = _activation_name(activations[0])
        self._extend_match(activations[0], name, replace(self._match.epilogue, activation=name))
        return set(activations)

    def _match_norm(self) -> set[Node]:
        """Add a norm to the match if one follows, and return the nodes that it replaces."""
        matched = self._match
        if "bias" in matched.extra_inputs and len(matched.last_node.meta["shape"]) < 2:
            return set()
        for match_at in NORMS:
            for node in matched.last_node.users:
                norm = match_at(node)
                if norm is not None and self._can_fuse_norm(norm):
                    self._extend_match(
                        norm.out, norm.name, norm.epilogue(matched.epilogue), **norm.extra_inputs
                    )
                    matched.nodes |= norm.nodes
                    return norm.nodes
        return set()

    def _can_fuse_norm(self, norm: Norm) -> bool:
        matched, call = self._match, self._trace.call(self._message)
        shape = matched.last_node.meta["shape"]
        if not norm.nodes <= self._following_nodes or not 0 < norm.normalized <= len(shape):
            return False
        inner = norm.nodes - {norm.out}
        read_elsewhere = any(not set(n.users) <= norm.nodes for n in inner)
        if read_elsewhere or inner & self._trace.lasting:
            return False
        if matched.last_node is not matched.total and not self._is_read_only_by(
            matched.last_node, norm.nodes
        ):
            return False  # the kernel does not return the activation's result
        if any(memory_of(n) in self._written - norm.writes for n in inner if memory_of(n)):
            return False
        if matched.extra_inputs.get("bias") is not None and norm.normalized > 1:
            return False
        if call.kind == "reduce_scatter":
            # A norm needs whole rows, so the scattered dim must not be a normalized dim.
            scattered_dim = call.run.arguments["dim"] % len(shape)  # type: ignore[attr-defined]
            if scattered_dim >= len(shape) - norm.normalized:
                return False
        normalized_shape = shape[len(shape) - norm.normalized :]
        return all(
            self._can_be_input(x, normalized_shape, norm.out) for x in norm.extra_inputs.values()
        )

    def _match_cast(self) -> None:
        matched = self._match
        node = self._only_user(matched.last_node)
        # With ``returns_total``, the dtype would also change that of total.
        if node is None or node.target is not _aten._to_copy.default or matched.returns_total:
            return
        wider_dtype = _WIDER_DTYPE.get(matched.last_node.meta["dtype"])
        if wider_dtype is None or node.kwargs.get("dtype") is not wider_dtype:
            return
        if set(node.kwargs) <= {"dtype", "layout", "device"}:
            self._extend_match(node, "cast")
            matched.dtype = wider_dtype

    def _match_reduce_shards(self) -> bool:
        """Match a call of the kernel itself, the op ``reduce_shards``, on the result of a message.

        A recording contains it where an op was planned to read the addends of all ranks directly.
        Return whether it was matched.
        """
        last = self._match.last_node
        node = self._only_user(last)
        if node is None or node.target is not _REDUCE_SHARDS.default:
            return False
        schema = _REDUCE_SHARDS.default._schema
        arguments: dict[str, Any] = dict(zip([a.name for a in schema.arguments], node.args))
        arguments |= node.kwargs
        dim_range = arguments["dim"], arguments["start"], arguments["size"]
        if list(arguments["parts"]) != [last] or dim_range != (0, 0, last.meta["shape"][0]):  # type: ignore
            return False
        if arguments.get("dtype") not in (None, last.meta["dtype"]):
            return False
        items = {user.args[1]: user for user in node.users if is_item(user)}
        extras = {name: arguments[name] for name in EXTRA_INPUTS if arguments.get(name) is not None}
        if 0 not in items or not all(self._can_be_input(x, None, node) for x in extras.values()):
            return False
        norm, normalized = arguments.get("norm", "none"), arguments.get("normalized", 0)
        epilogue = Epilogue(
            arguments.get("scale", 1.0), arguments.get("activation", "none"), norm, normalized,
            arguments.get("eps", 1e-5),
        )  # fmt: skip
        names = tuple(x for x in (*extras, epilogue.activation, f"{norm}_norm") if x != "none")
        returns_total = bool(arguments.get("keep_total")) and 1 in items
        total = items[1] if returns_total else items[0]
        inside = {node, *items.values()}
        self._match = EpilogueMatch(
            items[0], total, epilogue, extras, names, None, returns_total, inside
        )
        return True

    # -- who reads what ----------------------------------------------------------------------------

    def _extend_match(
        self, node: Node, name: str, epilogue: Any = None, **extra_inputs: Any
    ) -> None:
        """Add ``node`` to the match, as the op ``name`` of the kernel; it becomes the last node.

        ``extra_inputs`` are the tensors that ``node`` reads in addition to the sum, by name.
        """
        matched = self._match
        matched.last_node, matched.names = node, (*matched.names, name)
        matched.nodes.add(node)
        matched.epilogue = epilogue or matched.epilogue
        matched.extra_inputs |= {key: x for key, x in extra_inputs.items() if x is not None}

    def _only_user(self, node: Node) -> Node | None:
        """Return the op that reads ``node``, if the two can be fused; otherwise None.

        None: several ops read ``node``, the reader is after the next message, or the value of
        ``node`` outlives the step or is written into.
        """
        (first, *others) = node.users or (None,)
        if others or first not in self._following_nodes or node in self._trace.lasting:
            return None
        return None if memory_of(node) in self._written else first

    def _is_read_only_by(self, node: Node, readers: set[Node]) -> bool:
        escapes = node in self._trace.lasting or memory_of(node) in self._written
        return not escapes and set(node.users) <= readers

    def _can_be_input(self, x: Any, shape: tuple[int, ...] | None, reader: Node) -> bool:
        """Return whether ``x`` can be an additional input of the kernel.

        It must have the dtype of the sum and, unless it is None, the shape ``shape``. The kernel
        runs where the message is, so ``x`` must have the same value there as where ``reader`` reads
        it.
        """
        if (
            not isinstance(x, Node)
            or x.meta.get("dtype") is not self._match.last_node.meta["dtype"]
        ):
            return False
        if shape is not None and x.meta.get("shape") != tuple(shape):
            return False
        if not is_before(x, self._message):
            return False
        return not self._trace.is_written({memory_of(x)}, self._message, reader)


def is_before(x: Node, message: Node) -> bool:
    """Return whether ``x`` is computed before ``message``, or is a view of such a value.

    Only then can a call in place of ``message`` read it.
    """
    if x.op == "placeholder" or x < message:
        return True
    target = x.target
    is_view = isinstance(target, torch._ops.OpOverload) and target.is_view
    return is_view and all(is_before(n, message) for n in x.all_input_nodes)


def move_before(x: Node, message: Node) -> None:
    """Move ``x``, and the views that it is made of, before ``message``; ``is_before`` must hold."""
    if not x < message:
        for n in x.all_input_nodes:
            move_before(n, message)
        message.prepend(x)


def _activation_name(node: Node) -> str:
    """Return the name of the activation that ``node`` computes; "" for another op."""
    if node.target is _aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    if node.target is _aten.relu.default:
        return "relu"
    return "silu" if node.target is _aten.silu.default else ""
