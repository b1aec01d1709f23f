"""Sizes that vary: each is recorded, and code is compiled for the first and for all that follow."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor import compile_fx
from torch._inductor.decomposition import select_decomp_table

import consistent
from consistent import B, Placement, S
from tests.ranks import ALL, pool
from tests.reference import whole_numbers
from tests.rounding import gamma

from .steps import Made, beside


class Words(nn.Module):
    """A next word for each word: table, dropout, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.down, self.drop = nn.Linear(6, 11), nn.Dropout(0.3)

    def forward(self, x: Any) -> Any:
        x = self.table(x) * torch.arange(1, x.shape[1] + 1).view(-1, 1)
        return self.down(self.drop(F.gelu(x)))


def made(plan: str, optimizer: Any = torch.optim.AdamW) -> Callable[[], Made]:
    """A step whose loss is a mean over all words, and another over all that the model gives.

    Without an optimizer it ends with the gradients.
    """

    def make() -> Made:
        torch.manual_seed(0)
        model = consistent.parallelize(Words().double(), Placement.all("cpu"), plan)
        optim = optimizer and optimizer(model.parameters(), lr=0.01)

        def step(x: Any, y: Any) -> Any:
            model.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out.flatten(0, 1), y.flatten()) + out.square().mean()
            loss.backward()
            if optim:
                optim.step()
            return loss

        return step, [model, optim]

    return make


def batch(rows: int, words: int, sbp: Any, seed: int) -> tuple[Any, Any]:
    """Words, and those that follow them."""
    rng = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(11, (rows, words), generator=rng) for _ in range(2))
    p = Placement.all("cpu")
    return consistent.distribute(x, p, sbp), consistent.distribute(y, p, sbp)


@contextmanager
def compilations(by: Callable[..., Any] | None = None) -> Iterator[list[int]]:
    """The graphs that are compiled inside, by the number of their nodes; ``by`` compiles them."""
    found: list[int] = []
    compiler = compile_fx.compile_fx

    def counted(graph: Any, inputs: Any) -> Any:
        found.append(len(graph.graph.nodes))
        return (by or compiler)(graph, inputs)

    compile_fx.compile_fx = counted  # type: ignore[assignment]
    try:
        yield found
    finally:
        compile_fx.compile_fx = compiler


def traced(graph: Any, inputs: Any) -> Any:
    """What Inductor makes kernels of, without kernels: torch's own ops, with symbols for sizes."""
    compiled = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        inference_compiler=boxed_nop,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return compiled(graph, inputs)


EVEN = [(6, 5), (12, 7), (18, 4), (6, 9), (12, 3), (18, 8), (24, 6)]
UNEVEN = {
    2: [(5, 7), (7, 9), (9, 5), (5, 3)],
    3: [(7, 7), (10, 9), (13, 5), (7, 3)],
}


def _vary(
    rank: int,
    plan: str,
    sizes: list[tuple[int, int]],
    optimizer: Any = torch.optim.AdamW,
    by: Any = traced,
) -> tuple[int, int]:
    sbp = B if plan == "tensor" else S(0)
    batches = [batch(*size, sbp, seed=i) for i, size in enumerate(sizes) for _ in range(2)]
    batches += [batch(*size, sbp, seed=20 + i) for i, size in enumerate(sizes)]
    with compilations(by) as found:
        step = beside(made(plan, optimizer), batches, "inductor")
    return len(found), len(step.programs)


# Parts of other sizes mostly send other messages; on three ranks, one rank has two such families.
CASES = [
    ("data", 2, UNEVEN[2], 2), ("data", 3, EVEN, 2), ("zero3", 2, EVEN, 2),
    ("zero3", 3, UNEVEN[3], 4), ("tensor", 3, EVEN, 2), ("tensor", 2, UNEVEN[2], 2),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "ranks", "sizes", "most"), CASES if ALL else CASES[::3])
def test_sizes_share_code(plan: str, ranks: int, sizes: list, most: int) -> None:
    found = pool(ranks).run(_vary, plan, sizes, timeout=300)
    assert [programs for _, programs in found] == [len(sizes)] * ranks
    assert max(compiled for compiled, _ in found) == most


def test_kernels_of_inductor_serve_several_sizes() -> None:
    """A machine that has compiled nothing yet takes a minute."""
    assert pool(2).run(_vary, "data", EVEN[:3], None, None, timeout=300) == [(2, 3)] * 2


def _compiles_nothing(rank: int) -> tuple[int, int]:
    batches = [batch(*size, S(0), seed=i) for i, size in enumerate(EVEN) for _ in range(2)]
    with compilations(traced) as found:
        step = beside(made("data"), batches, "ops")
    return len(found), len(step.programs)


def test_backend_ops_compiles_nothing() -> None:
    assert pool(2).run(_compiles_nothing) == [(0, len(EVEN))] * 2


# -- on one process ------------------------------------------------------------------------------


def check(
    step: Callable[[Any], Any],
    sizes: list[int],
    dtype: torch.dtype = torch.float32,
    rtol: float = 0.0,
) -> list[int]:
    """Call ``step`` with tensors of so many rows, three times each, and again after all. Gives how
    many graphs were compiled once it had run with each size. Their values are whole numbers, of
    which every kernel makes the same sums and products to the bit."""
    program = consistent.compile(step, backend="inductor", fullgraph=True)
    counts = []
    with compilations(traced) as found:
        for n in [*sizes, *sizes]:
            for i in range(3):
                x = whole_numbers((n, 3), dtype, seed=i)
                for ours, theirs in zip(program(x), step(x), strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=0)
            counts.append(len(found))
    assert counts[len(sizes) :] == [counts[len(sizes) - 1]] * len(sizes)
    return counts[: len(sizes)]


def test_numbers_that_are_no_integers_are_inputs() -> None:
    def mean(x: torch.Tensor) -> tuple:
        return x.sum(0) * (1 / x.shape[0]), x.sum() / (x.shape[0] + 0.5), x - 1 / x.shape[0]

    for dtype in (torch.float32, torch.float64):
        assert check(mean, [5, 7, 9, 4, 6, 12], dtype) == [1, 2, 2, 2, 2, 2]


def test_numbers_that_would_be_rounded_stay_numbers() -> None:
    def mean(x: torch.Tensor) -> tuple:
        return (x * (1 / x.shape[0]),)

    assert check(mean, [5, 7, 9], torch.bfloat16) == [1, 2, 3]

    def power(x: torch.Tensor) -> tuple:
        return (x.abs() ** (1 / x.shape[0]),)

    # Torch's own vector code and that of Inductor take logarithms and exponentials of their own.
    assert check(power, [5, 7, 9], rtol=gamma(16, torch.float32)) == [1, 2, 3]


def test_what_torch_cannot_compile_for_several_sizes_is_compiled_for_each() -> None:
    def refusing(graph: Any, inputs: Any) -> Any:
        if any(isinstance(x, torch.SymInt) for x in inputs):
            raise RuntimeError("no symbols")
        return traced(graph, inputs)

    program = consistent.compile(lambda x: x.view(-1) * 2, backend="inductor", fullgraph=True)
    with compilations(refusing) as found:
        for n in (4, 5, 6, 5):
            for _ in range(3):
                assert torch.equal(program(torch.ones(n, 2)), torch.full((2 * n,), 2.0))
    assert len(found) == 4  # three sizes, and one attempt


def test_a_constant_may_differ() -> None:
    def weighed(x: torch.Tensor) -> tuple:
        return (x * torch.tensor([[float(i)] for i in range(len(x))]),)

    assert check(weighed, [5, 7, 9, 4]) == [1, 2, 2, 2]


def test_code_is_used_only_where_what_torch_assumed_holds() -> None:
    def pooled(x: torch.Tensor) -> tuple:  # a last window that is not full is left out, or not
        return (F.avg_pool1d(x.t(), 2, 4, ceil_mode=True) * 2,)

    assert check(pooled, [9, 13, 17, 8, 12, 21, 16]) == [1, 2, 2, 3, 3, 3, 3]


def test_branches_of_python_are_those_of_each_size() -> None:
    def step(x: torch.Tensor) -> tuple:
        if len(x) % 3 == 0:
            x = x * 2
        return (x + len(x), x * 3) if len(x) > 6 else (x - len(x), x * 0)

    check(step, [5, 7, 9, 4, 6, 12, 8, 3])


def test_no_and_one_row() -> None:
    def step(x: torch.Tensor) -> tuple:
        return x.sum(0), (x @ x.t()).sum(), torch.cat([x, x]).mean()

    for sizes in ([5, 7, 1, 0, 9, 2], [1, 5, 0, 7, 3], [0, 1, 4, 6, 8]):
        check(lambda x: tuple(torch.nan_to_num(y) for y in step(x)), sizes)


def test_rows_and_columns_that_are_equal_by_chance() -> None:
    weights = torch.ones(3, 5)

    def step(x: torch.Tensor) -> tuple:
        made = x @ weights
        return made, made.view(-1), made.t().contiguous(), x.t()[1:].reshape(-1)

    assert check(step, [5, 3, 15, 4, 6])[-1] <= 4


def test_a_tensor_of_other_strides_is_another_program() -> None:
    def step(x: torch.Tensor) -> tuple:
        return x.view(-1)[: len(x)] if x.is_contiguous() else x[:, 0], x * 2

    program = consistent.compile(step, backend="inductor", fullgraph=True)
    with compilations(traced):
        for n in (4, 6, 5, 4, 7):
            for x in (torch.randn(n, 3), torch.randn(3, n).t(), torch.randn(n, 6)[:, ::2]):
                for _ in range(3):
                    for ours, theirs in zip(program(x), step(x), strict=True):
                        assert torch.equal(ours, theirs)


def test_what_is_written_into_and_given_twice() -> None:
    whole = torch.zeros(64, 3)

    def step(x: torch.Tensor) -> tuple:
        part = whole[: len(x)]
        part.add_(x)
        return part + whole[0], part[1:].clone()

    program = consistent.compile(step, backend="inductor", fullgraph=True)
    with compilations(traced):
        for n in (4, 6, 5, 7, 6):
            for _ in range(3):
                whole.zero_()
                found = program(torch.ones(n, 3))
                whole.zero_()
                for ours, theirs in zip(found, step(torch.ones(n, 3)), strict=True):
                    assert torch.equal(ours, theirs)


def test_a_further_size_is_recorded_in_its_first_call() -> None:
    calls = []

    @consistent.compile(backend="ops", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for n in (4, 4, 5, 6, 5):
        step(torch.ones(n))
        calls.append(len(step.programs))
    assert calls == [0, 1, 2, 3, 3]
    step(torch.ones(4, 1))  # a call of another kind runs as it is written first
    assert len(step.programs) == 3


def test_programs_keep_no_tensors_of_their_recording() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @consistent.compile(backend="ops", fullgraph=True)
    def step(x: torch.Tensor) -> None:
        weight.grad = (weight.grad if weight.grad is not None else 0) + x.sum(0)
        optimizer.step()

    seen = []
    for n in (4, 4, 5, 5, 6):
        x = torch.ones(n, 3)
        step(x)
        seen += [weakref.ref(x), weakref.ref(weight.grad)]
        del x
    weight.grad = None
    gc.collect()
    assert len(step.programs) == 3
    assert "argument 0" in step.show()
    assert [ref() for ref in seen] == [None] * len(seen)
