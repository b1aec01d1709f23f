"""``flow.layers``: layers that create their own variables, shared by all layers of one name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F

from ..spec import B, Sbp
from ..tensor.global_tensor import GlobalTensor
from . import session
from .ops.micro_batches import op
from .ops.padding import pad_same, pair
from .variables.initializers import Initializer
from .variables.variable import get_variable

Activation = Callable[[Any], Any]


@op
def dense(
    inputs: Any,
    units: int,
    activation: Activation | None = None,
    use_bias: bool = True,
    kernel_initializer: Initializer | None = None,
    bias_initializer: Initializer | None = None,
    trainable: bool = True,
    name: str | None = None,
    model_distribute: Sbp = B,
) -> Any:
    """Apply a dense layer: ``inputs @ weight.T + bias``, then ``activation``.

    In einsum notation the product is ``...i, oi + o -> ...o``. ``units`` is the number of output
    features. ``model_distribute`` is the layout of the layer's variables:
    ``distribute.split(axis=0)`` splits the output features over the devices, and the default
    replicates them. Calls with the same ``name`` share the variables.
    """
    make = _variable_maker("Dense", name, inputs, trainable, model_distribute)
    weight = make("weight", (units, inputs.shape[-1]), kernel_initializer)
    bias = make("bias", (units,), bias_initializer) if use_bias else None
    out = F.linear(inputs, weight, bias)
    return out if activation is None else activation(out)


@op
def conv2d(
    inputs: Any,
    filters: int,
    kernel_size: int | Sequence[int] = 1,
    strides: int | Sequence[int] = 1,
    padding: str = "VALID",
    dilation_rate: int | Sequence[int] = 1,
    groups: int = 1,
    activation: Activation | None = None,
    use_bias: bool = True,
    kernel_initializer: Initializer | None = None,
    bias_initializer: Initializer | None = None,
    trainable: bool = True,
    name: str | None = None,
    model_distribute: Sbp = B,
) -> Any:
    """Apply a 2d convolution as ``torch.nn.functional.conv2d`` does, then ``activation``.

    ``inputs`` are [n, channels, height, width], and ``filters`` is the number of output channels.
    ``padding`` is "VALID" (none) or "SAME" (``ceil(n / stride)`` outputs). ``model_distribute`` is
    the layout of the layer's variables, as in ``dense``.
    """
    make = _variable_maker("Conv2D", name, inputs, trainable, model_distribute)
    kernel, stride, dilation = pair(kernel_size), pair(strides), pair(dilation_rate)
    weight = make("weight", (filters, inputs.shape[1] // groups, *kernel), kernel_initializer)
    bias = make("bias", (filters,), bias_initializer) if use_bias else None
    x, pads = pad_same(inputs, padding, kernel, stride, dilation)
    out = F.conv2d(x, weight, bias, stride, pads, dilation, groups)
    return out if activation is None else activation(out)


def _variable_maker(
    kind: str, name: str | None, inputs: Any, trainable: bool, sbp: Sbp
) -> Callable[[str, Sequence[int], Initializer | None], Any]:
    """Return a function that creates the variables of a layer, on the placement of its ``inputs``.

    A layer without a name is named after its ``kind`` and its number among the unnamed layers of
    that kind in its job. ``sbp`` is the layout of the variables.
    """
    if name is None:
        run = session.require_run(f"layers.{kind.lower()} without a name")
        name = f"{run.job}-{kind}_{run.names[kind]}"
        run.names[kind] += 1
    placement = inputs.placement if isinstance(inputs, GlobalTensor) else None

    def make(part: str, shape: Sequence[int], initializer: Initializer | None) -> Any:
        return get_variable(
            f"{name}-{part}",
            shape,
            None,
            initializer,
            trainable,
            distribute=sbp,
            placement=placement,
        )

    return make
