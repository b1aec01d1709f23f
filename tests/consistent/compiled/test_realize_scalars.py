"""Numbers are kept where ops on larger tensors read them, before and after as text."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from consistent.compiled.backends.realize_scalars import KEPT, realize_scalars
from tests.twins import randn


def _recorded(f: Any, *given: torch.Tensor) -> torch.fx.GraphModule:
    """``f`` as a recorder notes it."""
    graph = make_fx(f)(*given)
    for node in graph.graph.nodes:
        x = node.meta.get("val", node.meta.get("tensor_meta"))
        if x is not None and hasattr(x, "shape"):
            node.meta["shape"], node.meta["dtype"] = tuple(x.shape), x.dtype
    return graph


def _ops(graph: torch.fx.GraphModule) -> list[str]:
    """Each op with what it reads."""
    return [
        f"{node.name} = {node.target.name().partition('::')[2]}"
        f"({', '.join(n.name for n in node.all_input_nodes)})"
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]


def _decayed(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    step.add_(1)
    return x * (1 - torch.pow(0.9, step)) + torch.zeros(())


def test_a_number_that_follows_from_inputs_is_kept_before_a_larger_op_reads_it() -> None:
    x, step = randn(6), torch.tensor(3.0)
    graph = _recorded(_decayed, x, step)
    made = realize_scalars(graph, [x, step])
    assert _ops(made) == [
        "add_ = add_.Tensor(step_1)",
        "pow_1 = pow.Scalar(add_)",
        "rsub = rsub.Scalar(pow_1)",
        "kept_default = kept(rsub)",
        "mul = mul.Tensor(x_1, kept_default)",
        "zeros = zeros()",
        "add = add.Tensor(mul, zeros)",
    ]


def test_values_and_what_is_written_are_the_same() -> None:
    x, step = randn(6), torch.tensor(3.0)
    made = realize_scalars(_recorded(_decayed, x, step.clone()), [x, step])
    own = step.clone()
    torch.testing.assert_close(made(x, own), _decayed(x, step))
    assert own == step == 4


def test_numbers_in_kernels_of_a_gpu_stay_where_they_are() -> None:
    graph = _recorded(_decayed, randn(6), torch.tensor(3.0))
    assert realize_scalars(graph, [torch.empty(6, device="meta")]) is graph


def test_the_op_keeps_what_torch_asks_of_ops() -> None:
    torch.library.opcheck(KEPT, (torch.tensor(2.0),))
