"""Pattern matching of layer norms and RMS norms, which torch records as one op or as several."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ..fused.calls import Epilogue

_aten = torch.ops.aten
# None if this torch has no such op.
_RMS = getattr(_aten, "_fused_rms_norm", None)


@dataclass
class Norm:
    """A match: nodes that compute a layer norm or an RMS norm over the last dims.

    Args:
        name: "layer_norm" or "rms_norm".
        out: the node of the result.
        nodes: all nodes of the norm.
        normalized: number of dims that it normalizes.
        eps, weight, norm_bias: parameters of the norm; the last two are nodes, or None.
        writes: ``memory_of`` of the values into which the norm's own nodes write.
    """

    name: str
    out: Node
    nodes: set[Node]
    normalized: int
    eps: float
    weight: Any = None
    norm_bias: Any = None
    writes: frozenset[Any] = frozenset()

    def epilogue(self, before: Epilogue) -> Epilogue:
        """Return ``before``, the settings of the kernel so far, with this norm added."""
        kind = self.name.removesuffix("_norm")
        return replace(before, norm=kind, normalized=self.normalized, eps=self.eps)

    @property
    def extra_inputs(self) -> dict[str, Any]:
        """The weight and bias tensors that the norm has, by name."""
        parameters = {"weight": self.weight, "norm_bias": self.norm_bias}
        return {name: x for name, x in parameters.items() if x is not None}


def layer_norm(node: Node) -> Norm | None:
    """Match a layer norm at ``node`` of which only the output is read, not mean and rstd."""
    if node.target is not _aten.native_layer_norm.default:
        return None
    out = _only_result(node)
    _, shape, weight, bias, eps = node.args
    if out is None:
        return None
    return Norm("layer_norm", out, {node, out}, len(shape), eps, weight, bias)  # type: ignore


def fused_rms_norm(node: Node) -> Norm | None:
    """Match an RMS norm that is a single op, as torch runs it on CUDA."""
    if _RMS is None or node.target is not _RMS.default:
        return None
    out = _only_result(node)
    _, shape, weight, eps = node.args
    if out is None or eps is None:
        return None
    return Norm("rms_norm", out, {node, out}, len(shape), eps, weight)  # type: ignore


def _only_result(node: Node) -> Node | None:
    """Return the first result of ``node``; None if another result is read too.

    Backward reads further results, such as the mean, which the fused kernel does not return.
    """
    items = {user.args[1]: user for user in node.users}
    return items[0] if set(items) == {0} else None


def rms_norm(square: Any) -> Norm | None:
    """Match an RMS norm of several ops, as torch runs it on the CPU; ``square`` is the first.

    ```
    %2 = pow(%1, 2)   %3 = mean(%2)   add_(%3, eps)   %4 = rsqrt(%3)   mul(%1, %4)   mul(.., weight)
    ```
    """
    if square.target is not _aten.pow.Tensor_Scalar or square.args[1] != 2:
        return None
    x: Any = square.args[0]
    mean: Any = _only_reader(square, _aten.mean.dim)
    if mean is None or len(mean.args) < 3 or not mean.args[2] or mean.kwargs:
        return None
    plus = [n for n in mean.users if n.target in (_aten.add_.Scalar, _aten.add_.Tensor)]
    root = [n for n in mean.users if n.target is _aten.rsqrt.default]
    # add_ modifies the mean in place, and rsqrt reads the mean's node, so rsqrt must come after
    # add_.
    if len(mean.users) != 2 or len(plus) != 1 or len(root) != 1 or not plus[0] < root[0]:
        return None
    product: Any = _only_reader(root[0], _aten.mul.Tensor)
    eps = plus[0].args[1]
    if product is None or plus[0].kwargs or plus[0].users or not isinstance(eps, float):
        return None
    if set(product.args) != {x, root[0]}:
        return None
    dims, inside = mean.args[1], {square, mean, plus[0], root[0], product}
    ndim = len(x.meta["shape"])
    normalized_dims = sorted(d % ndim for d in dims)
    if normalized_dims != list(range(ndim - len(normalized_dims), ndim)):
        return None
    writes = frozenset(plus[0].meta.get("written", ()))
    norm = Norm("rms_norm", product, inside, len(normalized_dims), eps, writes=writes)
    scaled = _only_reader(product, _aten.mul.Tensor)
    if scaled is not None and product in scaled.args[:1]:
        weight = scaled.args[1]
        normalized_shape = x.meta["shape"][ndim - len(normalized_dims) :]
        if isinstance(weight, Node) and weight.meta.get("shape") == normalized_shape:
            norm = replace(norm, out=scaled, nodes=inside | {scaled}, weight=weight)
    return norm


def _only_reader(node: Node, target: Any) -> Node | None:
    """Return the reader of ``node`` if it is the only one and an op ``target``; else None."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


NORMS = (layer_norm, fused_rms_norm, rms_norm)
