"""Facts about products of groups that the brute force over rows does not name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import consistent
from consistent import B, Placement, S
from consistent.forms.families.matrices.grouped_mm import product
from mirrored.transports.counting import counting
from tests.ranks import simulate
from tests.rounding import assert_rounded
from tests.twins import randn


def _alone(x: Any, w: Any, edges: list[int]) -> torch.Tensor:
    """The product by ordinary ops."""
    spans = list(zip(edges, edges[1:], strict=False))
    if x.ndim == w.ndim == 2:
        return torch.stack([x[:, a:b] @ w[a:b] for a, b in spans])
    if x.ndim == 2:
        rows = [x[a:b] @ w[k] for k, (a, b) in enumerate(spans)]
        return torch.cat([x[: edges[0]] @ w[0] * 0, *rows, x[edges[-1] :] @ w[0] * 0])
    columns = [x[k] @ w[:, a:b] for k, (a, b) in enumerate(spans)]
    return torch.cat([x[0] @ w[:, : edges[0]] * 0, *columns, x[0] @ w[:, edges[-1] :] * 0], 1)


SHAPES = [((9, 5), (3, 5, 6)), ((3, 4, 5), (5, 9)), ((4, 9), (9, 6))]
EDGES = [[0, 2, 5, 9], [2, 2, 4, 7], [9, 9, 9, 9], [0, 0, 0, 0]]


@pytest.mark.parametrize("edges", EDGES, ids=repr)
@pytest.mark.parametrize("shapes", SHAPES, ids=repr)
def test_groups_lie_between_edges_forward_and_twice_backward(shapes: Any, edges: Any) -> None:
    single = [randn(*shape, seed=i).float() for i, shape in enumerate(shapes)]  # as torch takes it
    at = torch.tensor(edges, dtype=torch.int32)

    def found(multiply: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
        given = [x.requires_grad_() for x in given]
        made = multiply(*given)
        first = torch.autograd.grad(made.square().sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), given)
        return [made, *first, *second]

    def alone(x: Any, w: Any) -> torch.Tensor:
        return _alone(x, w, edges)

    exact = found(alone, [x.double() for x in single])
    sizes = found(alone, [x.double().abs() for x in single])
    # A term of the last gradients has passed five sums of at most 9 products, and additions.
    assert_rounded(found(lambda x, w: product(x, w, at), single), exact, sizes, 5 * (9 + 3))


@pytest.mark.parametrize("shapes", [*SHAPES, ((3, 4, 5), (3, 5, 6))], ids=repr)
def test_the_op_keeps_what_torch_asks_of_ops(shapes: Any) -> None:
    x, w = (randn(*shape).float().requires_grad_() for shape in shapes)
    edges = None if x.ndim == w.ndim == 3 else torch.tensor([1, 2, 4, 5], dtype=torch.int32)
    torch.library.opcheck(product, (x, w, edges))


def test_what_transformers_calls_where_it_is_compiled_is_the_same_product() -> None:
    pytest.importorskip("transformers.integrations.moe")
    x, w = randn(10, 8).float(), randn(4, 8, 4).float()
    offs = torch.tensor([2, 2, 7, 10], dtype=torch.int32)
    fallback, wide = torch.ops.transformers.grouped_mm_fallback, [t.double() for t in (x, w)]

    def main(rank: int) -> list[Any]:
        p = Placement("cpu", range(3))
        given = [consistent.distribute(t, p, sbp) for t, sbp in ((x, S(0)), (w, B))]
        with counting() as sent:
            made = [F.grouped_mm(*given, offs=offs), fallback(*given, offs)]
            assert [m.sbp for m in made] == [(S(0),)] * 2
            assert set(sent.names) <= {"gather_objects"}  # by which plain tensors are compared
        whole = fallback(*(t.double() for t in given), offs)  # torch has no such product
        return [m.full() for m in (*made, whole)]

    exact, sizes = (_alone(*given, [0, 2, 2, 7, 10]) for given in (wide, [t.abs() for t in wide]))
    for *single, whole in simulate(main, 3):
        assert_rounded(single, [exact] * 2, [sizes] * 2, 8)
        torch.testing.assert_close(whole, exact, rtol=1e-13, atol=1e-13)
