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
_TIMES = (_aten.mul.Tensor, _aten.mul.Scalar)
_BY = (_aten.div.Tensor, _aten.div.Scalar)
_REDUCED = torch.ops.consistent.reduce_shards
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BESIDE = ("bias", "residual", "weight", "norm_bias")


@dataclass
class EpilogueMatch:
    """Ops after a sum over ranks that one kernel can compute with it, and that kernel's arguments.

    The kernel computes total = scale * sum + bias + residual, and then norm(activation(total)).

    Args:
        at: the last matched node, whose value the kernel returns.
        total: the node of total; equal to ``at`` if there is no activation and no norm.
        epilogue: scale, activation and norm.
        beside: the tensors that the ops read in addition to the sum (bias, residual, weights of the
            norm), by name.
        names: the names of the ops, for reports and for comparison between ranks.
        dtype: dtype of the results, if it differs from that of the sum.
        keeps: whether total is read elsewhere, so that the kernel must return it too.
        inside: the nodes that the kernel replaces.
    """

    at: Node
    total: Node
    epilogue: Epilogue = field(default_factory=Epilogue)
    beside: dict[str, Node] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    keeps: bool = False
    inside: set[Node] = field(default_factory=set)


def stretch(trace: Trace, message: Node) -> Iterator[Node]:
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
    if len(items) != 1 or not items[0].meta["shape"] or items[0].meta["dtype"] not in _SUMMED:
        return None
    matched = _EpilogueMatcher(trace, message, items[0], written).found()
    return matched if matched.names and matched.at.meta.get("contiguous") else None


class _EpilogueMatcher:
    """Matcher of the ops after the sum ``message``, one op at a time, in the kernel's order.

    ``item`` is the node of the result of the message.
    """

    def __init__(self, trace: Trace, message: Node, item: Node, written: set[Any]) -> None:
        self._trace, self._message, self._written = trace, message, written
        self._after = set(stretch(trace, message))
        self._match = EpilogueMatch(item, item)

    def found(self) -> EpilogueMatch:
        if self._reduced_again():
            return self._match
        for step in (self._scale, self._bias, self._residual):
            step()
        self._match.total = self._match.at
        total = self._match.total
        if memory_of(total) not in self._written and total.meta.get("contiguous"):
            inside = self._activation() | self._norm()
            self._match.keeps = bool(inside) and (
                total in self._trace.lasting or not set(total.users) <= inside
            )
        self._cast()
        return self._match

    # -- one op at a time --------------------------------------------------------------------------

    def _scale(self) -> None:
        node = self._only_user(self._match.at)
        if node is None or node.kwargs or len(node.args) != 2:
            return
        a, b = node.args
        number = b if a is self._match.at else a
        if not isinstance(number, int | float) or isinstance(number, bool):
            return
        if node.target in _TIMES:
            self._take(node, "scale", Epilogue(scale=float(number)))
        elif node.target in _BY and a is self._match.at and number != 0:
            self._take(node, "scale", Epilogue(scale=1 / number))

    def _bias(self) -> None:
        shape = self._match.at.meta["shape"]
        if len(shape) > 1:
            self._added("bias", shape[-1:])

    def _residual(self) -> None:
        self._added("residual", self._match.at.meta["shape"])

    def _added(self, name: str, shape: tuple[int, ...]) -> None:
        at = self._match.at
        node = self._only_user(at)
        if node is None or node.target is not _aten.add.Tensor or node.kwargs:
            return
        other = node.args[1] if node.args[0] is at else node.args[0]
        if other is not at and self._is_beside(other, shape, node):
            self._take(node, name, **{name: other})

    def _activation(self) -> set[Node]:
        """Add an activation to the match if one follows, and return its nodes."""
        at = self._match.at
        done = [node for node in at.users if node in self._after and _activation(node)]
        if len(done) != 1 or done[0].args[0] is not at:
            return set()
        name = _activation(done[0])
        self._take(done[0], name, replace(self._match.epilogue, activation=name))
        return set(done)

    def _norm(self) -> set[Node]:
        """Add a norm to the match if one follows, and return the nodes that it replaces."""
        matched = self._match
        if "bias" in matched.beside and len(matched.at.meta["shape"]) < 2:
            return set()
        for match in NORMS:
            for node in matched.at.users:
                found = match(node)
                if found is not None and self._fits(found):
                    self._take(
                        found.out, found.name, found.epilogue(matched.epilogue), **found.beside
                    )
                    matched.inside |= found.inside
                    return found.inside
        return set()

    def _fits(self, norm: Norm) -> bool:
        matched, call = self._match, self._trace.call(self._message)
        shape = matched.at.meta["shape"]
        if not norm.inside <= self._after or not 0 < norm.normalized <= len(shape):
            return False
        inner = norm.inside - {norm.out}
        read_elsewhere = any(not set(n.users) <= norm.inside for n in inner)
        if read_elsewhere or inner & self._trace.lasting:
            return False
        if matched.at is not matched.total and not self._is_alone(matched.at, norm.inside):
            return False  # the kernel does not return the activation's result
        if any(memory_of(n) in self._written - norm.writes for n in inner if memory_of(n)):
            return False
        if matched.beside.get("bias") is not None and norm.normalized > 1:
            return False
        if call.kind == "reduce_scatter":
            # A norm needs whole rows, so the scattered dim must not be a normalized dim.
            cut = call.run.arguments["dim"] % len(shape)  # type: ignore[attr-defined]
            if cut >= len(shape) - norm.normalized:
                return False
        own = shape[len(shape) - norm.normalized :]
        return all(self._is_beside(x, own, norm.out) for x in norm.beside.values())

    def _cast(self) -> None:
        matched = self._match
        node = self._only_user(matched.at)
        # With ``keeps``, the dtype would also change that of total.
        if node is None or node.target is not _aten._to_copy.default or matched.keeps:
            return
        wide = _WIDE.get(matched.at.meta["dtype"])
        if wide is None or node.kwargs.get("dtype") is not wide:
            return
        if set(node.kwargs) <= {"dtype", "layout", "device"}:
            self._take(node, "cast")
            matched.dtype = wide

    def _reduced_again(self) -> bool:
        """Match a call of the kernel itself, the op ``reduce_shards``, on the result of a message.

        A recording contains it where an op was planned to read the addends of all ranks directly.
        Return whether it was matched.
        """
        at = self._match.at
        node = self._only_user(at)
        if node is None or node.target is not _REDUCED.default:
            return False
        schema = _REDUCED.default._schema
        given: dict[str, Any] = dict(zip([a.name for a in schema.arguments], node.args))
        given |= node.kwargs
        whole = given["dim"], given["start"], given["size"]
        if list(given["parts"]) != [at] or whole != (0, 0, at.meta["shape"][0]):  # type: ignore
            return False
        if given.get("dtype") not in (None, at.meta["dtype"]):
            return False
        items = {user.args[1]: user for user in node.users if is_item(user)}
        beside = {name: given[name] for name in BESIDE if given.get(name) is not None}
        if 0 not in items or not all(self._is_beside(x, None, node) for x in beside.values()):
            return False
        norm, normalized = given.get("norm", "none"), given.get("normalized", 0)
        epilogue = Epilogue(
            given.get("scale", 1.0), given.get("activation", "none"), norm, normalized,
            given.get("eps", 1e-5),
        )  # fmt: skip
        names = tuple(x for x in (*beside, epilogue.activation, f"{norm}_norm") if x != "none")
        keeps = bool(given.get("keep_total")) and 1 in items
        total = items[1] if keeps else items[0]
        inside = {node, *items.values()}
        self._match = EpilogueMatch(items[0], total, epilogue, beside, names, None, keeps, inside)
        return True

    # -- who reads what ----------------------------------------------------------------------------

    def _take(self, node: Node, name: str, epilogue: Any = None, **beside: Any) -> None:
        """Add ``node`` to the match, as the op ``name`` of the kernel; it becomes the last node.

        ``beside`` are the tensors that ``node`` reads in addition to the sum, by name.
        """
        matched = self._match
        matched.at, matched.names = node, (*matched.names, name)
        matched.inside.add(node)
        matched.epilogue = epilogue or matched.epilogue
        matched.beside |= {key: x for key, x in beside.items() if x is not None}

    def _only_user(self, node: Node) -> Node | None:
        """Return the op that reads ``node``, if the two can be fused; otherwise None.

        None: several ops read ``node``, the reader is after the next message, or the value of
        ``node`` outlives the step or is written into.
        """
        (first, *others) = node.users or (None,)
        if others or first not in self._after or node in self._trace.lasting:
            return None
        return None if memory_of(node) in self._written else first

    def _is_alone(self, node: Node, readers: set[Node]) -> bool:
        lasts = node in self._trace.lasting or memory_of(node) in self._written
        return not lasts and set(node.users) <= readers

    def _is_beside(self, x: Any, shape: tuple[int, ...] | None, reader: Node) -> bool:
        """Return whether ``x`` can be an additional input of the kernel.

        It must have the dtype of the sum and, unless it is None, the shape ``shape``. The kernel
        runs where the message is, so ``x`` must have the same value there as where ``reader`` reads
        it.
        """
        if not isinstance(x, Node) or x.meta.get("dtype") is not self._match.at.meta["dtype"]:
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


def put_before(x: Node, message: Node) -> None:
    """Move ``x``, and the views that it is made of, before ``message``; ``is_before`` must hold."""
    if not x < message:
        for n in x.all_input_nodes:
            put_before(n, message)
        message.prepend(x)


def _activation(node: Node) -> str:
    """Return the name of the activation that ``node`` computes; "" for another op."""
    if node.target is _aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    if node.target is _aten.relu.default:
        return "relu"
    return "silu" if node.target is _aten.silu.default else ""
