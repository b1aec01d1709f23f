"""The flops and bytes of calls, by shapes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from consistent.auto.machines.op_signature import Like, Plain, Same
from consistent.auto.machines.work import work_of
from consistent.cost_model.work import Work

aten = torch.ops.aten


class Noted(TorchDispatchMode):
    """Notes the work of each op."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.works.append(work_of(func, args, kwargs or {}, out))
        return out


def of(func: Any, *args: Any, **kwargs: Any) -> Work:
    return work_of(func, args, kwargs, func(*args, **kwargs))


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ids(*shape: int) -> Tensor:
    return t(*shape, dtype=torch.int64)


# what is called -> kind, flops, elements of 4 bytes read + written
CALLS = {
    "mm": (lambda: of(aten.mm.default, t(2, 3), t(3, 5)), "matmul", 60, 6 + 15 + 10),
    "bmm": (lambda: of(aten.bmm.default, t(7, 2, 3), t(7, 3, 5)), "matmul", 420, 7 * 31),
    "addmm": (lambda: of(aten.addmm.default, t(5), t(2, 3), t(3, 5)), "matmul", 60, 36),
    "addmm in place": (
        lambda: of(aten.addmm_.default, t(2, 5), t(2, 3), t(3, 5)), "matmul", 60, 20 + 6 + 15,
    ),
    "mv": (lambda: of(aten.mv.default, t(2, 3), t(3)), "matmul", 12, 11),
    "add": (lambda: of(aten.add.Tensor, t(8), t(8)), "pointwise", 0, 24),
    "add a row": (lambda: of(aten.add.Tensor, t(4, 8), t(8).expand(4, 8)), "pointwise", 0, 72),
    "add in place": (lambda: of(aten.add_.Tensor, t(8), t(8)), "pointwise", 0, 24),
    "square": (lambda: square(t(8)), "pointwise", 0, 16),
    "add out": (lambda: of(aten.add.out, t(8), t(8), out=t(8)), "pointwise", 0, 24),
    "zero": (lambda: of(aten.zero_.default, t(8)), "copy", 0, 8),
    "copy into": (lambda: of(aten.copy_.default, t(8), t(8)), "copy", 0, 16),
    "ones like": (lambda: of(aten.ones_like.default, t(8)), "copy", 0, 8),
    "empty like": (lambda: of(aten.empty_like.default, t(8)), "view", 0, 0),
    "transpose": (lambda: of(aten.transpose.int, t(2, 3), 0, 1), "view", 0, 0),
    "split": (lambda: of(aten.split.Tensor, t(6), 2), "view", 0, 0),
    "unsafe view": (lambda: of(aten._unsafe_view.default, t(6), [2, 3]), "view", 0, 0),
    "clone of expanded": (lambda: of(aten.clone.default, t(1, 8).expand(4, 8)), "copy", 0, 40),
    "cat": (lambda: of(aten.cat.default, [t(3), t(5)]), "copy", 0, 16),
    "sum": (lambda: of(aten.sum.dim_IntList, t(4, 8), [1]), "reduction", 0, 36),
    "embedding": (lambda: of(aten.embedding.default, t(99, 4), ids(3)), "copy", 0, 6 + 24),
    "gather": (lambda: of(aten.gather.default, t(9, 4), 0, ids(2, 4)), "copy", 0, 16 + 16),
    "index": (lambda: of(aten.index.Tensor, t(99, 4), [ids(3)]), "copy", 0, 6 + 24),
    "index put": (
        lambda: of(aten.index_put_.default, t(99, 4), [ids(3)], t(3, 4)), "copy", 0, 6 + 24,
    ),
    "index put, added": (
        lambda: of(aten.index_put_.default, t(99, 4), [ids(3)], t(3, 4), True), "copy", 0, 6 + 36,
    ),
    "foreach add": (
        lambda: of(aten._foreach_add_.List, [t(3), t(5)], [t(3), t(5)]), "pointwise", 0, 24,
    ),
    "foreach sqrt": (lambda: of(aten._foreach_sqrt.default, [t(3), t(5)]), "pointwise", 0, 16),
    "fused adamw": (lambda: fused_adamw(), "pointwise", 0, 8 * (2 + 1 + 2 + 2) + 1),
}  # fmt: skip


def square(x: Tensor) -> Work:
    return of(aten.mul.Tensor, x, x)


def fused_adamw() -> Work:
    func = aten._fused_adamw_.default
    args = ([t(8)], [t(8)], [t(8)], [t(8)], [], [t(1)])
    kwargs = dict(
        lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False
    )
    return work_of(func, args, kwargs, None)


@pytest.mark.parametrize("name", CALLS)
def test_flops_and_bytes_of_a_call(name: str) -> None:
    call, kind, flops, elements = CALLS[name]
    work = call()
    assert (work.kind, work.flops, work.nbytes) == (kind, flops, 4 * elements)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_count_each_groups_products_once(groups: int, transposed: bool) -> None:
    x, w = torch.randn(2, 4, 6, 6, requires_grad=True), torch.randn(4, 4 // groups, 3, 3)
    w.requires_grad_()
    conv = F.conv_transpose2d if transposed else F.conv2d
    with Noted() as noted:
        y = conv(x, w, groups=groups)
        y.sum().backward()
    forward, backward = (n.flops for n in noted.works if n.kind == "convolution")
    pixels = 36 if transposed else 16
    assert forward == 2 * 2 * 4 * pixels * (4 // groups) * 9 and backward == 2 * forward


def test_attention_of_a_cpu_is_counted_forward_and_backward() -> None:
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    with Noted() as noted:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    counts = [n.flops for n in noted.works if n.kind == "attention"]
    assert counts == [2 * 2 * 8 * 8 * 4 * products for products in (2, 5)]


def test_a_call_without_data_is_the_same_work_as_one_with_it() -> None:
    real, meta = (torch.empty(4, 4, device=device) for device in ("cpu", "meta"))
    assert of(aten.mm.default, real, real) is of(aten.mm.default, meta, meta)


def test_a_key_tells_types_of_numbers_and_repeated_tensors_apart() -> None:
    x = t(2)
    works = {of(aten.mul.Tensor, x, y) for y in (x, t(2), 1, 1.0)}
    assert len(works) == 4
    assert of(aten.mul.Tensor, x, x).key.args == (Like(torch.float32, (2,), (1,)), Same(0))
    assert of(aten.add.Tensor, x, float("nan")) is of(aten.add.Tensor, x, float("nan"))
    assert of(aten.mul.Tensor, x, 2).key.args[1] == Plain("int", 2)


def test_the_dtype_is_that_of_the_largest_float_tensor() -> None:
    weight = t(9, 4, dtype=torch.bfloat16)
    assert of(aten.embedding.default, weight, ids(100)).dtype is torch.bfloat16


@pytest.mark.parametrize("benchmark", [False, True])
def test_a_convolution_of_cudnn_is_one_however_its_kernel_is_found(benchmark: bool) -> None:
    x, w, out = t(2, 4, 6, 6), t(8, 4, 3, 3), t(2, 8, 4, 4)
    given = (x, w, [0, 0], [1, 1], [1, 1], 1, benchmark, False, True)
    work = work_of(aten.cudnn_convolution.default, given, {}, out)
    assert work.flops == 2 * out.numel() * 4 * 9
