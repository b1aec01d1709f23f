"""What takes a tensor for a window onto a memory does what it does on one device, or raises."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from consistent import B, P, S
from consistent.spec import Sbp
from tests.ranks import in_turn, on_ranks, pool
from tests.twins import GRIDS, Laid, compare, randn

CASES: list[Callable[..., Any]] = []
LAYOUTS: list[tuple[Sbp, Sbp]] = [(S(0), B), (S(1), S(0)), (B, B), (P, S(1)), (B, P)]


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES.append(function)
    return function


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_equals_plain_torch(function: Callable[..., Any]) -> None:
    for world in in_turn(CASES.index(function)):
        pool(world).run(compare, function, GRIDS[world], timeout=60)


# -- data ------------------------------------------------------------------------------------------


@case
def data_of_another_layout_between_two_backward_passes(at: Laid) -> Any:
    found = []
    for old, new in itertools.permutations(LAYOUTS, 2):
        for size in ((5, 4), (4, 4)):
            p = at.leaf(randn(*size), *old)
            loss = (p * p).sum()
            loss.backward()
            held = p.grad
            p.data = at(randn(*size, seed=1), *new)
            assert p.grad is held
            found += [p, held]
            again = (p * p * p).sum()
            again.backward()
            found += [loss, again, p.grad, (p + held)]
    return found


@case
def data_of_another_shape_or_dtype(at: Laid) -> Any:
    found = []
    for old, new in itertools.product(LAYOUTS, repeat=2):
        p = at.leaf(randn(5, 4), *old)
        p.data = at(randn(3, 6, seed=1), *new)
        (p * p).sum().backward()
        q = at.leaf(randn(5, 4), *old)
        kept = (q * 2).sum()
        q.data = at(randn(5, 4, seed=1), *new).float()
        (q * q).sum().backward()
        found += [p, p.grad, p.shape, q, q.grad, q.dtype, kept]
    return found


@case
def data_that_is_plain(at: Laid) -> Any:
    p = at.leaf(randn(5, 4), S(0))
    (p * p).sum().backward()
    p.data = randn(5, 4, seed=1)
    (p * p).sum().backward()
    return p, p.grad


@case
def data_shares_memory_and_no_history(at: Laid) -> Any:
    found = []
    for entries in [(S(0), B), (S(1), S(0)), (B, B)]:  # of P, a copy is what is multiplied
        p = at.leaf(randn(5, 4), *entries)
        y = (p * p).sum()
        p.data.mul_(2)  # no graph hears of it
        assert not p.data.requires_grad and p.data.is_leaf and p._version == 0
        y.backward()
        p.data[1] = 7
        q = p.data
        q.zero_()
        found += [p, p.grad, q, p.data.is_set_to(p.data)]
    return found


@case
def data_within_training(at: Laid) -> Any:
    torch.manual_seed(0)
    model = at.module(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double(), PLAN)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    found = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        loss = model(at(randn(5, 4, seed=step), S(0))).square().sum()
        loss.backward()
        optimizer.step()
        for p in model.parameters():
            p.data = p.data * 0.5
        found += [loss, [p.grad for p in model.parameters()]]
    return found, list(model.parameters())


PLAN = {"0.weight": S(0), "0.bias": S(0), "2.weight": S(1)}


@case
def parameters_as_one_vector(at: Laid) -> Any:
    found = []
    for laid in (S(0), B, P):
        torch.manual_seed(0)
        model = at.module(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double(), PLAN)
        for round_ in range(3):
            loss = model(at(randn(5, 4), S(0))).square().sum()
            loss.backward()
            vector = parameters_to_vector(model.parameters())
            grads = parameters_to_vector([p.grad for p in model.parameters()])
            given = (vector - 0.1 * grads).detach()
            if round_ == 1:
                given = at(randn(given.numel()), laid)
            vector_to_parameters(given, model.parameters())
            found += [loss, vector, grads, *model.parameters()]
    return found


@case
def plain_vector_to_parameters(at: Laid) -> Any:
    torch.manual_seed(0)
    model = at.module(nn.Linear(4, 6).double(), {"weight": S(0)})
    model(at(randn(5, 4), S(0))).sum().backward()
    vector_to_parameters(randn(30), model.parameters())
    model(at(randn(5, 4), S(0))).square().sum().backward()
    return list(model.parameters()), [p.grad for p in model.parameters()]


@case
def modules_change_their_dtype(at: Laid) -> Any:
    torch.manual_seed(0)
    model = at.module(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), {"0.*": S(0)})
    model(at(randn(5, 4).float(), S(0))).sum().backward()
    model.double()
    model.zero_grad(set_to_none=False)
    model(at(randn(5, 4), S(0))).square().sum().backward()
    return model.state_dict(), [p.grad for p in model.parameters()]


# -- detach_, set_, resize_ ------------------------------------------------------------------------


@case
def detached_in_place(at: Laid) -> Any:
    found = []
    for entries in LAYOUTS:
        p = at.leaf(randn(5, 4), *entries)
        y = p * 2
        z = (y + p).sum()
        y.detach_()
        assert y.is_leaf and not y.requires_grad and y.grad_fn is None
        y.requires_grad_()
        (z + (y * y).sum()).backward()
        found += [y, p.grad, y.grad]
    return found


@case
def set_to_another_tensor(at: Laid) -> Any:
    found = []
    for old, new in itertools.product(LAYOUTS, repeat=2):
        p, source = at.leaf(randn(5, 4), *old), at(randn(3, 4, seed=1), *new)
        with torch.no_grad():
            assert p.set_(source) is p
            source.mul_(2)
        (p * p).sum().backward()
        x = at(randn(5, 4), *old).set_(at(randn(5, 4, seed=2), *new))
        found += [p, p.grad, p.shape, x]
    return found


@case
def resized_to_the_size_it_has(at: Laid) -> Any:
    found = []
    for entries in LAYOUTS:
        x = at(randn(5, 4), *entries)
        assert x.resize_(5, 4) is x and x.resize_((5, 4)) is x and x.resize_as_(randn(5, 4)) is x
        found.append(x)
    return found


@case
def new_ones(at: Laid) -> Any:
    x = at(randn(5, 4), S(0))
    size = x.new(2, 3), x.new(torch.Size((3,))), x.new()
    return [tuple(y.shape) for y in size], [y.dtype for y in size], x.new([1.0, 2.0]), x.new((3,))


# -- as_strided ------------------------------------------------------------------------------------

WINDOWS = [((3, 2), (4, 1), None), ((2, 3, 2), (4, 2, 1), None), ((4, 2), (1, 1), 3), ((), (), 5)]


@case
def read_by_other_strides(at: Laid) -> Any:
    found = []
    for entries, window in itertools.product(LAYOUTS, WINDOWS):
        x = at.leaf(randn(5, 4), *entries)
        y = x.as_strided(*window)
        (y * randn(*y.shape, seed=1)).sum().backward()
        found += [y, x.grad, torch.as_strided(x * 2, *window)]
        if window[2] is None:
            columns = at(randn(4, 5), *entries).t()
            found += [
                columns.as_strided(*window),
                at(randn(6, 4), *entries)[1:].as_strided(*window),
            ]
    return found


@case
def views_by_strides_follow_what_is_written(at: Laid) -> Any:
    found = []
    for entries in LAYOUTS:
        x = at(randn(5, 4), *entries)
        y = x.as_strided((2, 3), (4, 1))
        x.mul_(2)
        found += [y + 0, x]
    b = at(randn(5, 4))
    b.as_strided((2, 3), (4, 1), 1).fill_(7)
    return found, b


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "resize_": (lambda x: x.resize_(2, 2), "x.new_empty"),
    "resize_as_": (lambda x: x.resize_as_(x[:1]), "torch.empty_like"),
    "as_strided_": (lambda x: x.as_strided_((2,), (1,)), "x.as_strided"),
    "set_ to a storage": (lambda x: x.set_(torch.ones(3).untyped_storage()), "x.data = y"),
    "set_ with a history": (lambda x: x.requires_grad_().set_(x.detach()), "no_grad"),
    "data of another placement": (
        lambda x: setattr(x, "data", x.to_global(_last(x), B)),
        "Parameter",
    ),
    "new of a tensor": (lambda x: x.new(x), "x.new_tensor"),
    "offset in a view": (lambda x: x[1:].as_strided((2,), (1,), 2), "the base"),
}


def _last(x: Any) -> Any:
    import consistent

    return consistent.Placement("cpu", [x.placement.ranks.ravel().tolist()[-1]])


def _refuses(rank: int, name: str, ranks: Any) -> list[str]:
    import consistent

    call, _ = REFUSED[name]
    found = []
    for entries in LAYOUTS:
        x = Laid(consistent.Placement("cpu", ranks))(randn(5, 4), *entries)
        before = x.full()
        with pytest.raises(RuntimeError) as error:
            call(x)
        assert torch.equal(x.full(), before) and "x is f64[" in str(error.value)
        found.append(str(error.value))
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_right_answer_raises_on_every_rank(name: str) -> None:
    for world in (2, 3, 4):
        results = pool(world).run(_refuses, name, GRIDS[world])
        assert all(result == results[0] for result in results)
        assert all(REFUSED[name][1] in text for text in results[0]), results[0]


def _world(n: int) -> Any:
    import consistent

    return consistent.Placement("cpu", list(range(n)))


@on_ranks(2)
def test_what_is_written_into_a_copy_is_not_lost_without_a_word(rank: int) -> None:
    x = Laid(_world(2))(randn(5, 4), S(0))
    for view in (x.as_strided((2, 3), (4, 1)), x.long().view(-1)):
        with pytest.raises(RuntimeError, match="boxing had to move its data"):
            view.mul_(2)
