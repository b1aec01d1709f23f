"""Ranks outside a placement: every op's shapes and graph, forward and backward, without a value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import consistent
from consistent import B, GlobalTensor, Placement, S
from consistent.dispatch.planning.functions.torch_functions import resolve
from consistent.rules import find_row
from consistent.spec import Sbp
from mirrored import use
from mirrored.transports.in_process import InProcess, InProcessState
from tests.brute_force import Example
from tests.consistent.rules.corpus import FAMILIES
from tests.each_of import each_of
from tests.ranks import ALL, on_ranks


def follow(case: Example, sbp: Sbp) -> list[Any]:
    """``case`` as rank 0 sees it where ranks 1 and 2 run it; gradients of what requires one."""
    placement = Placement("cpu", [1, 2])

    def laid(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        y = consistent.distribute(x.detach(), placement, sbp if x.ndim else B)
        continuous = x.dtype.is_floating_point or x.dtype.is_complex
        return y.requires_grad_().clone() if continuous else y

    args, kwargs = tree_map(laid, (case.args, case.kwargs))
    out = case.func(*args, **kwargs)
    found = [x for x in tree_leaves(out) if isinstance(x, GlobalTensor)]
    if resolve(case.func).inplace:
        found.append(args[0])
    tracked = [x for x in found if x.requires_grad]
    if tracked:
        sum((x.abs() if x.is_complex() else x).sum() for x in tracked).backward()
    return found


class _FromNobody(InProcess):
    def gather_notes(self, note: bytes, ranks: tuple[int, ...]) -> list[bytes]:
        return [b""] * len(ranks)  # no rank has met an error


@pytest.fixture
def outside() -> Any:
    """Rank 0 of 3, whose other ranks never answer: whatever it asks them raises, but for whether
    they have met an error."""
    world = InProcessState(3)
    world.finished = {1, 2}
    with use(_FromNobody(world, 0)):
        yield


@pytest.mark.parametrize("sbp", [B, S(0)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_op_is_followed_alone(family: str, sbp: Sbp, outside: None) -> None:
    # What lies whole is followed as what is split, but for the choice of signatures and forms.
    for case in FAMILIES[family][:: 1 if ALL or sbp.is_split else 8]:
        try:
            found = follow(case, sbp)
        except RuntimeError as error:
            # Torch does not differentiate every operand, such as a running mean.
            if "is not differentiable" in str(error):
                continue
            # The rule says that the data decides how long the result is, so that it must be told.
            row = find_row(resolve(case.func).name)
            if "nobody will send" in str(error) and row is not None and row.outs is not None:
                continue
            raise AssertionError(f"{case}: {error}") from error
        for x in found:
            with torch._C.DisableTorchFunctionSubclass():
                held = tuple(torch.Tensor.size(x))
            assert x.to_local().numel() == 0 and held == x._spec.local_shape(None), case


# Sizes of the target and of the other operands, first those that torch accepts, then others.
SIZES = [((3, 4), (3, 4)), ((6, 5), (6, 5)), ((3, 4), (4,)), ((3, 4), ())]
SIZES += [
    ((1, 3, 4), (2, 3, 4)),
    ((3, 4), (2, 3, 4)),
    ((3, 4), (5,)),
    ((5,), (4,)),
    ((4, 3), (3, 4)),
    ((), (2,)),
]
WRITES = {
    "add_": lambda x, y: x.add_(y, alpha=2),
    "sub_": lambda x, y: x.sub_(y),
    "mul_": lambda x, y: x.mul_(y),
    "copy_": lambda x, y: x.copy_(y),
    "lerp_": lambda x, y: x.lerp_(y, 0.5),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y, value=-1.0),
    "clamp_": lambda x, y: x.clamp_(0.0, 1.0),
    "with itself": lambda x, y: x.add_(x).mul_(x),
    "expanded": lambda x, y: x[..., :1].expand(x.shape).add_(y) if x.ndim else x.add_(y),
    "transposed": lambda x, y: x.t().add_(y) if x.ndim < 3 else x.add_(y),
    "shared memory": lambda x, y: x.view(-1)[1:].add_(x.view(-1)[:-1]),
}


@each_of("sizes", SIZES)
@each_of("name", list(WRITES))
def test_a_write_without_gradients_is_counted_or_refused_as_by_torch(
    name: str, sizes: Any, outside: None
) -> None:
    placement = Placement("cpu", [1, 2])

    def written(make: Any) -> Any:
        x, y = map(make, sizes)
        before = x._version
        try:
            out = WRITES[name](x, y)
        except RuntimeError as error:
            return type(error)
        return tuple(out.shape), out.dtype, x._version - before

    with torch.no_grad():
        plain = written(lambda size: torch.empty(size, device="meta"))
        of_rank = written(lambda size: consistent.zeros(size, placement=placement, sbp=B))
    assert of_rank == plain


def test_what_autograd_tracks_is_recorded_by_a_write(outside: None) -> None:
    placement = Placement("cpu", [1, 2])
    x = consistent.zeros(3, placement=placement, sbp=B, requires_grad=True)
    y = (x * 1).lerp_(x, 0.5).addcmul_(x, x)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == (3,)


FRACTIONS = {
    "add_": lambda x, y: x.int().add_(y),
    "mul_": lambda x, y: x.int().mul_(y),
    "mul_ by a number": lambda x, y: x.int().mul_(0.5),
    "lerp_": lambda x, y: x.int().lerp_(y, 0.5),
    "clamp_": lambda x, y: x.int().clamp_(0.5),
    "addcmul_": lambda x, y: x.int().addcmul_(y, y),
    "into booleans": lambda x, y: x.bool().mul_(y),
}


@on_ranks(3)
def test_integers_take_no_fractions_on_any_rank(rank: int) -> None:
    # Torch's meta kernels of some of these ops do not refuse them.
    x, y = (consistent.ones(3, 4, placement=Placement("cpu", [1, 2]), sbp=B) for _ in range(2))
    for name, write in FRACTIONS.items():
        with pytest.raises(RuntimeError, match="cast|expected dtype|can't be converted|not imple"):
            pytest.fail(f"{name} gave {write(x, y).dtype}")
