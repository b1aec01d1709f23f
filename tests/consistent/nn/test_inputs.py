"""What ranks pass to a parallelized module is their part of the batch, or all of it."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, GlobalTensor, Placement, S
from mirrored.transports.counting import Counting
from mirrored.transports.default import current, use
from tests.ranks import on_ranks
from tests.twins import randn


class Net(nn.Module):
    """Gives what it is given, and a product with a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x: Any, *rest: Any, **named: Any) -> Any:
        return self.linear(x), rest, named


def net(placement: Placement, inputs: Any) -> nn.Module:
    return consistent.parallelize(Net(), placement, inputs=inputs)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (3, 2, 2, 2), (4, 4, 4, 1), (0, 1, 5, 0), (5, 0)])
def test_parts_make_up_the_batch(rank: int, sizes: tuple[int, ...]) -> None:
    world = current().size
    mine = [*sizes, 0, 0][:world]
    if not sum(mine):
        return
    whole = randn(sum(mine), 3)
    part = whole.split(mine)[rank]
    y, _, _ = net(Placement.all("cpu"), S(0))(part)
    assert type(y) is GlobalTensor and y.shape == (sum(mine), 2)
    torch.testing.assert_close(y.detach().full(), Net()(whole)[0].detach())


@on_ranks(2, 3)
def test_gradients_are_those_of_the_whole_batch(rank: int) -> None:
    world = current().size
    sizes, whole, alone = [3, 1, 2][:world], randn(6, 3), Net()
    whole = whole[: sum(sizes)]
    model = net(Placement.all("cpu"), S(0))
    model(whole.split(sizes)[rank])[0].square().mean().backward()
    alone(whole)[0].square().mean().backward()
    torch.testing.assert_close(model.linear.weight.grad.full(), alone.linear.weight.grad)


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    name: str


@on_ranks(2)
def test_what_is_nested_is_taken_and_what_has_no_dims_stays(rank: int) -> None:
    p = Placement.all("cpu")
    point = collections.namedtuple("point", "x y")
    whole, ids = randn(5, 3), torch.arange(5)
    part, part_ids = whole.split([3, 2])[rank], ids.split([3, 2])[rank]
    given = consistent.distribute(whole, p, S(0))
    counts = collections.OrderedDict(labels=part_ids, mask=part_ids > 2)
    scalar, flags = torch.tensor(3.0), [None, 1, "text"]
    _, rest, named = net(p, S(0))(
        part, [part_ids, {"deep": (part,)}], point(part, 1), Batch(part_ids, "a"), counts,
        given, scalar, flags, batch=counts, keep=True,
    )  # fmt: skip
    nested, pair, batch, dictionary, same, stays, other = rest
    for found, wanted in (
        (nested[0], ids), (nested[1]["deep"][0], whole), (pair.x, whole), (batch.ids, ids),
        (dictionary["labels"], ids), (dictionary["mask"], ids > 2), (named["batch"]["labels"], ids),
    ):  # fmt: skip
        assert found.sbp == (S(0),) and torch.equal(found.full(), wanted), found
    assert type(pair) is point and type(dictionary) is collections.OrderedDict
    assert batch.name == "a" and counts["labels"] is part_ids
    assert same is given and stays is scalar and other is flags and named["keep"] is True


@on_ranks(4)
def test_each_axis_has_its_own(rank: int) -> None:
    p = Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))
    whole = randn(5, 3)
    part = whole.split([4, 1])[rank // 2]
    for inputs in ({"dp": S(0)}, (S(0), B), {"*": (S(0), B)}):
        y, _, _ = net(p, inputs)(part)
        torch.testing.assert_close(y.detach().full(), Net()(whole)[0].detach())
    quarter = whole.split([1, 2, 0, 2])[rank]
    y, _, _ = net(p, (S(0), S(0)))(quarter)
    torch.testing.assert_close(y.detach().full(), Net()(whole)[0].detach())
    with pytest.raises(ValueError, match="whole along an axis.*pass other values"):
        net(p, {"dp": S(0)})(whole[:2] + rank)
    with pytest.raises(ValueError, match="1 SBPs, and .* 2 axes.*'dp': S\\(0\\)"):
        net(p, S(0))


@on_ranks(3)
def test_ranks_outside_follow(rank: int) -> None:
    p, whole = Placement("cpu", [0, 2]), randn(5, 3)
    part = {0: whole[:1], 1: randn(7, 3), 2: whole[1:]}[rank]
    y, _, _ = net(p, S(0))(part)
    assert y.shape == (5, 2)
    total = y.sum()
    total.backward()
    assert total.item() == pytest.approx(Net()(whole)[0].sum().item())


@on_ranks(2)
def test_by_name_and_whole(rank: int) -> None:
    p, whole, row = Placement.all("cpu"), randn(4, 3), randn(1, 3)
    model = net(p, {"*": S(0), "shift": B})
    _, _, named = model(whole.split(2)[rank], shift=row)
    assert named["shift"].sbp == (B,) and named["shift"].shape == (1, 3)
    _, _, named = net(p, {"x": S(0)})(whole.split(2)[rank], shift=row)
    assert named["shift"] is row
    assert net(p, B)(whole)[0].sbp == (B,)
    with pytest.raises(ValueError, match="pass other values.*\n.*\n.*\n.*inputs=S\\(0\\)"):
        net(p, B)(whole + rank)
    with pytest.raises(ValueError, match="pass other shapes"):
        net(p, B)(whole[: 2 + rank])


@on_ranks(2)
def test_only_the_first_call_compares_and_whole_inputs_then_send_nothing(rank: int) -> None:
    p, whole = Placement.all("cpu"), randn(4, 3)
    parts, alike = net(p, S(0)), net(p, B)
    for model, wanted in ((parts, 1), (alike, 0)):
        model(whole)
        with use(Counting(current())) as counting:
            model(whole)
        assert len(counting.calls) == wanted, counting.calls


@on_ranks(2)
def test_parts_that_do_not_fit_are_an_error_on_every_rank(rank: int) -> None:
    p = Placement.all("cpu")
    for mine, words in (
        (randn(2, 3 + rank), "do not fit beside each other.*Pad to one size"),
        (randn(2, 3).to([torch.float64, torch.float32][rank]), "other arguments.*\n.*float64"),
        (randn(*[2, 3][: 2 - rank]), "other arguments"),
        (randn(1 + 3 * rank, 3).requires_grad_(), "uneven.*its gradient is asked for"),
    ):
        with pytest.raises(ValueError, match=words):
            net(p, S(0))(mine)
    with pytest.raises(ValueError, match="inputs=P makes addends"):
        net(p, "P")
    with pytest.raises(ValueError, match="neither an axis .* nor an argument"):
        consistent.parallelize(nn.Linear(2, 2), p, inputs={"y": S(0)})
