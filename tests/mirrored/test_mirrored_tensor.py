"""A list with one element a device: in, out, and to and from one logical tensor."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import consistent
import mirrored
from consistent import B, P, S
from mirrored import MirroredTensor
from tests.ranks import simulate

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool, torch.bfloat16)


def parts(
    count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return [torch.randint(0, 100, shape, generator=numbers).to(dtype) for _ in range(count)]


def message(call: Any, *args: Any) -> str:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        call(*args)
    return str(caught.value)


# -- in and out ----------------------------------------------------------------------------------


def round_trip(rank: int, given: list[torch.Tensor], ranks: tuple[int, ...] | None) -> Any:
    x = mirrored.scatter(given, ranks)
    return x.to_list(), x.is_meta, x.ranks


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    ranks=st.one_of(
        st.none(),
        st.permutations(range(4)).flatmap(lambda p: st.integers(1, 4).map(lambda n: tuple(p[:n]))),
    ),
)
def test_scatter_then_to_list_is_the_identity(
    shape: tuple[int, ...], dtype: torch.dtype, ranks: tuple[int, ...] | None
) -> None:
    members = tuple(range(4)) if ranks is None else ranks
    given = parts(len(members), shape, dtype)
    for rank, (found, is_meta, of) in enumerate(simulate(round_trip, 4, given, ranks)):
        assert of == members and is_meta is (rank not in members)
        assert len(found) == len(given) and all(map(torch.equal, found, given))


def there_and_back(rank: int, sbp: Any, shape: tuple[int, ...]) -> Any:
    grid = consistent.placement("cpu", [[0, 1], [2, 3]])
    value = torch.arange(float(np.prod(shape))).view(shape)
    g = consistent.distribute(value, grid, sbp)
    m = g.to_mirrored()
    again = m.to_global(sbp, placement=grid)
    return type(m) is MirroredTensor, again.sbp == g.sbp, torch.equal(again.full(), value)


@settings(max_examples=30, deadline=None)
@given(
    sbp=st.tuples(*[st.sampled_from([S(0), S(1), B, P])] * 2),
    shape=st.tuples(st.integers(0, 7), st.integers(0, 7)),
)
def test_global_to_mirrored_to_global_is_the_identity(sbp: Any, shape: tuple[int, ...]) -> None:
    assert simulate(there_and_back, 4, sbp, shape) == [(True, True, True)] * 4


def joined(rank: int) -> Any:
    x = mirrored.scatter(parts(3, (2, 4)))
    g = x.to_global()
    back = g.to_mirrored()
    return g.full(), g.sbp, torch.equal(back.to_local(), x.to_local()), back.ranks


def test_mirrored_to_global_joins_and_comes_back() -> None:
    for full, sbp, same, ranks in simulate(joined, 3):
        assert torch.equal(full, torch.cat(parts(3, (2, 4))))
        assert sbp == (S(0),) and same and ranks == (0, 1, 2)


def added(rank: int) -> torch.Tensor:
    return mirrored.scatter(parts(3, (2,))).to_global(P).full()


def test_elements_of_partial_sum_add_up() -> None:
    for full in simulate(added, 3):
        assert torch.equal(full, sum(parts(3, (2,))))


def numpy_arrays(rank: int) -> list[list[float]]:
    return [x.tolist() for x in mirrored.scatter([np.arange(2.0), np.ones(2)]).to_list()]


def test_elements_may_be_numpy_arrays() -> None:
    assert simulate(numpy_arrays, 2) == [[[0.0, 1.0], [1.0, 1.0]]] * 2


# -- ops are local -------------------------------------------------------------------------------


def local_ops(rank: int) -> Any:
    x = mirrored.scatter(parts(2, (3, 4)))
    plain = parts(2, (3, 4))[rank]
    y = torch.nn.functional.relu(x @ torch.ones(4, 2)) + 1
    first, second = y.split(1, dim=1)
    y.add_(1)
    largest = x.max(0)
    return [
        (type(v) is MirroredTensor and v.ranks == (0, 1), torch.equal(v.to_local(), w))
        for v, w in [
            (y, torch.relu(plain @ torch.ones(4, 2)) + 2),
            (first + second, (torch.relu(plain @ torch.ones(4, 2)) + 2).sum(1, keepdim=True)),
            (largest.values, plain.max(0).values),
            (copy.deepcopy(x), plain),
            (pickle.loads(pickle.dumps(x)), plain),
        ]
    ]


def test_ops_are_those_of_the_element() -> None:
    assert simulate(local_ops, 2) == [[(True, True)] * 5] * 2


def shown(rank: int) -> str:
    return repr(mirrored.scatter([torch.zeros(1), torch.ones(1)]))


def test_it_prints_its_element_and_its_ranks() -> None:
    assert simulate(shown, 2) == [f"tensor([{n}.], mirrored over ranks (0, 1))" for n in (0, 1)]


# -- gradients -----------------------------------------------------------------------------------


def gradients(rank: int, sbp: Any) -> torch.Tensor:
    element = torch.full((3,), rank + 1.0, requires_grad=True)
    g = mirrored.from_local(element).to_global(sbp, check=False)
    (g**2).sum().backward()
    assert element.grad is not None
    return element.grad


@pytest.mark.parametrize(("sbp", "expected"), [(S(0), (2.0, 4.0)), (P, (6.0, 6.0))])
def test_gradient_of_a_joined_tensor_reaches_its_element(sbp: Any, expected: Any) -> None:
    for found, value in zip(simulate(gradients, 2, sbp), expected):
        assert found.tolist() == [value] * 3


def gradient_of_pieces(rank: int) -> torch.Tensor:
    x = consistent.distribute(torch.arange(5.0), consistent.placement("cpu", [0, 1]), S(0))
    x.requires_grad_()
    (x.to_mirrored() * (rank + 1)).sum().backward()
    return x.grad.full()


def test_gradient_of_the_pieces_reaches_the_global_tensor() -> None:
    for found in simulate(gradient_of_pieces, 2):
        assert found.tolist() == [1, 1, 1, 2, 2]


# -- errors, on every rank -----------------------------------------------------------------------

MIXED = {
    "operator": lambda a, b: a + b,
    "function": torch.mul,
    "reflected": lambda a, b: a.__rsub__(b),
    "list": lambda a, b: torch.cat([a, b]),
    "in place": lambda a, b: a.add_(b),
    "keyword": lambda a, b: torch.nn.functional.mse_loss(a, target=b),
    "index": lambda a, b: a[b > 0],
}


def mixing(rank: int, how: str) -> list[str]:
    g = consistent.distribute(torch.ones(2), consistent.placement("cpu", [0, 1]), B)
    m = mirrored.from_local(torch.ones(2))
    return [message(MIXED[how], *pair) for pair in ((m, g), (g, m))]


@pytest.mark.parametrize("how", MIXED)
def test_mixing_the_views_says_what_to_call(how: str) -> None:
    for texts in simulate(mixing, 2, how):
        for text in texts:
            assert "a mirrored tensor meets a global one" in text
            assert "to_global(sbp)" in text and "to_mirrored()" in text


def given_twice(rank: int) -> list[str]:
    g = consistent.distribute(torch.ones(2), consistent.placement("cpu", [0, 1]), B)
    m = mirrored.from_local(torch.ones(2))
    return [
        message(mirrored.from_local, g),
        message(mirrored.from_local, m),
        message(consistent.distribute, m, g.placement, B),
    ]


def test_a_tensor_of_one_view_is_no_plain_tensor_for_the_other() -> None:
    for of_global, of_mirrored, distributed in simulate(given_twice, 2):
        assert "Use x.to_mirrored()" in of_global
        assert "Use x.to_local()" in of_mirrored
        assert "to_global(sbp)" in distributed


def wrong(rank: int, what: str) -> str:
    match what:
        case "length":
            return message(mirrored.scatter, parts(2, (2,)))
        case "shape":
            return message(mirrored.scatter, [torch.ones(2), torch.ones(3), torch.ones(2)])
        case "dtype":
            return message(mirrored.scatter, [torch.ones(2), torch.ones(2).int(), torch.ones(2)])
        case "type":
            return message(mirrored.scatter, torch.ones(3))
        case "ranks":
            return message(mirrored.scatter, parts(2, (2,)), (0, 7))
        case "uneven":
            pieces = mirrored.from_local(torch.ones(1 + rank))
            return message(pieces.to_global)
        case "unequal":
            return message(mirrored.from_local(torch.full((2,), float(rank))).to_global, B)
        case _:
            a, b = mirrored.scatter(parts(3, (2,))), mirrored.scatter(parts(2, (2,)), (0, 1))
            return message(torch.add, a, b)


WRONG = {
    "length": "the list has 2 elements, and there are 3 devices",
    "shape": "element 1 is torch.float32 (3,), and element 0 is torch.float32 (2,)",
    "dtype": "element 1 is torch.int32 (2,), and element 0 is torch.float32 (2,)",
    "type": "parts is a Tensor, and a list with one element for each of the 3 devices is wanted",
    "ranks": "ranks are (0, 7), and the world has 3",
    "uneven": "rank 0 has a piece of shape (1,)",
    "unequal": "must have the same values",
    "other ranks": "one mirrored tensor lies on ranks (0, 1, 2), another on (0, 1)",
}


@pytest.mark.parametrize("what", WRONG)
def test_error_on_every_rank(what: str) -> None:
    assert all(WRONG[what] in text for text in simulate(wrong, 3, what))
