"""What torch's kernels refuse for its dtypes or sizes is refused on every rank: also on those
outside the placement, whose meta kernels accept it, and on those with an empty shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import consistent
from consistent import B, Placement, S
from consistent.dispatch.planning.functions.torch_functions import resolve
from mirrored.every_rank import gather_from_ranks
from tests.brute_force import Example
from tests.consistent.dispatch.running.test_agreed import on_every_rank_alike, raised
from tests.consistent.rules.corpus import EXAMPLES
from tests.ranks import ALL, on_ranks

# Ops of our own kernels, which refuse a dtype where the values are: there is no meta run of these.
OWN_KERNELS = frozenset("_scaled_mm _scaled_mm_v2 rand_like randint_like rrelu uniform".split())
DTYPES = (torch.bool, torch.int64, torch.float16, torch.complex64)


def _one_of_each_op() -> list[Example]:
    cases = {}
    for case in EXAMPLES:
        function = resolve(case.func)
        cases.setdefault((function.name, function.inplace), case)
    return list(cases.values())


def _raises(case: Example, dtype: torch.dtype, make: Callable[[torch.Tensor], Any]) -> bool:
    """Whether the call raises with its real numbers in ``dtype``, each tensor being what ``make``
    makes of it."""

    def changed(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return make(x.detach().abs().to(dtype) if x.is_floating_point() else x.detach().clone())

    args, kwargs = tree_map(changed, (case.args, case.kwargs))
    return raised(lambda: case.func(*args, **kwargs)) is not None


@on_ranks(3)
def test_no_rank_outside_accepts_the_dtypes_that_kernels_refuse(rank: int) -> None:
    placement = Placement("cpu", [1, 2])
    cases = _one_of_each_op()[:: 1 if ALL else 6]
    refused = 0
    for dtype in DTYPES:
        bad = [case for case in cases if _raises(case, dtype, lambda x: x)]
        every = gather_from_ranks(
            [_raises(c, dtype, lambda x: consistent.distribute(x, placement, B)) for c in bad]
        )
        for case, *said in zip(bad, *every, strict=True):
            inside = said[1:]
            alone = resolve(case.func).name in OWN_KERNELS and inside == [True, True]
            assert alone or inside == said[:1] * 2, (case, dtype, said)
        refused += sum(every[0])
    assert refused > 50


# Of one row that is split over two ranks, so that one of them has an empty shard.
OF_ONE_ROW: dict[str, tuple[torch.dtype, Callable[[Any], Any]]] = {
    "frac": (torch.int64, lambda x: x.frac()),
    "softmax": (torch.int64, lambda x: torch.softmax(x, 1)),
    "cumsum_": (torch.bool, lambda x: x.cumsum_(1)),
    "matmul": (torch.bool, lambda x: x @ x.t()),
    "bmm": (torch.bool, lambda x: torch.bmm(x[:, None], x[:, :, None])),
    "median": (torch.bool, lambda x: x.median(1)),
    "mode": (torch.complex64, lambda x: x.mode(1)),
    "log_softmax": (torch.bool, lambda x: torch.log_softmax(x, 1)),
    "cummax": (torch.complex64, lambda x: x.cummax(1)),
}


@on_ranks(3)
def test_no_rank_with_an_empty_shard_accepts_what_others_refuse(rank: int) -> None:
    for placement in (Placement("cpu", [1, 2]), Placement("cpu", [0, 1, 2])):
        for name, (dtype, call) in OF_ONE_ROW.items():
            x = torch.ones(1, 4).to(dtype)
            expected = raised(lambda c=call, x=x: c(x.clone()))
            y = consistent.distribute(x, placement, S(0))
            mine = raised(lambda c=call, y=y: c(y))
            on_every_rank_alike((name, mine))
            assert expected and mine and mine[0] == expected[0], (name, mine)
            fine = consistent.distribute(torch.ones(3, 4), placement, S(0))
            assert float(fine.sum().full()) == 12


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda x, y: x.add_(y),
    "eq_": lambda x, y: x.eq_(y),
    "clamp_": lambda x, y: x.clamp_(y),
    "copysign_": lambda x, y: x.copysign_(y),
    "atan2_": lambda x, y: x.atan2_(y),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
}


@pytest.mark.parametrize("sbp", [B, S(0)], ids=str)
@on_ranks(3)
def test_a_target_smaller_than_the_other_operands_keeps_its_shape(rank: int, sbp: Any) -> None:
    # Torch's meta kernels of comparisons give the target another shape.
    for placement in (Placement("cpu", [1, 2]), Placement("cpu", [0, 1, 2])):
        for name, write in WRITES.items():
            for warm in (False, True):  # with the plan of an earlier call, too
                x = consistent.distribute(torch.ones(5, 1), placement, sbp)
                if warm:
                    write(x, x * 2)
                mine = raised(lambda w=write, x=x: w(x, torch.ones_like(x[:, 0])))
                on_every_rank_alike((name, mine))
                assert mine and "broadcast shape" in mine[1] and x.shape == (5, 1), (name, mine)
