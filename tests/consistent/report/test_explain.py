"""explain(): the candidates of a call, what each costs, the choice; nothing is computed or sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import consistent
from consistent import B, P, S
from consistent.dispatch.plans.plan import plans
from mirrored.transports.counting import counting
from tests.ranks import pool


def _laid(
    shape: tuple[int, ...], *sbp: Any, ranks: Any = (0, 1), dtype: Any = torch.float32
) -> Any:
    placement = consistent.placement("cpu", ranks)
    return consistent.distribute(torch.ones(shape, dtype=dtype), placement, sbp)


def _matmul(rank: int) -> Any:
    return consistent.explain(torch.matmul, _laid((64, 32), S(0)), _laid((32, 48), S(1)))


def test_candidates_name_their_boxes_and_bytes_and_the_cheapest_is_chosen() -> None:
    (explanation, _) = pool(2).run(_matmul)
    (options,) = explanation["matmul"].axes
    first = options[0]
    assert first.chosen and sum(option.chosen for option in options) == 1
    assert repr(first.signature) == "S(0), B -> S(0)"
    assert first.boxes == ("1: S(1)->B",) and first.nbytes == 32 * 48 * 4 // 2 == explanation.nbytes
    assert [o.seconds for o in options] == sorted(o.seconds for o in options)
    assert {repr(o.signature) for o in options} >= {
        "B, S(1) -> S(1)",
        "S(1), S(0) -> P",
        "B, B -> B",
    }


def test_prints_a_table_with_an_arrow_at_the_choice() -> None:
    text = repr(pool(2).run(_matmul)[0])
    assert text.splitlines()[0] == "matmul: runs on the shards -> S(0); 3,072 bytes"
    (arrow,) = [line for line in text.splitlines() if line.lstrip().startswith("->")]
    assert arrow.split() == [
        "->",
        "S(0),",
        "B",
        "->",
        "S(0)",
        "1:",
        "S(1)->B",
        "3,072",
        "36.3",
        "us",
    ]


def _one_rank_asks(rank: int) -> Any:
    x, w = _laid((8, 4), S(0)), _laid((4, 6), S(1))
    if rank:
        return None
    before = {id(plan) for plan in plans.values()}
    with counting() as log:
        consistent.explain(torch.matmul, x, w)
        consistent.explain(F.dropout, x)
        consistent.explain(torch.Tensor.add_, x, 1.0)
    return log.names, {id(plan) for plan in plans.values()} == before, x.to_local().tolist()


def test_one_rank_may_ask_and_nothing_is_sent_written_or_kept() -> None:
    names, same_plans, shard = pool(2).run(_one_rank_asks)[0]
    assert names == [] and same_plans and shard == torch.ones(4, 4).tolist()


def _bytes_as_sent(rank: int) -> Any:
    x, t = _laid((8, 6), S(1)), _laid((8,), S(0), dtype=torch.int64)
    said = consistent.explain(F.cross_entropy, x, t)
    with counting() as log:
        F.cross_entropy(x, t)
    return said, log.bytes


def test_a_composition_shows_the_ops_inside_it() -> None:
    said, sent = pool(2).run(_bytes_as_sent)[0]
    assert [op.name for op in said.ops] == ["cross_entropy", "cross_entropy_loss"]
    assert said["cross_entropy"].how.startswith("opened")
    assert said.nbytes >= sent > 0


@torch.library.custom_op("test_explain::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


_twice.register_fake(torch.empty_like)


def _whole(rank: int) -> Any:
    return consistent.explain(torch.ops.test_explain.twice, _laid((4, 4), S(0)))


def test_an_op_that_runs_whole_says_so_with_its_bytes() -> None:
    (op,) = pool(2).run(_whole)[0].ops
    assert op.how.startswith("runs whole on every rank") and op.nbytes == 32


def _two_axes(rank: int) -> Any:
    x = _laid((8, 8), S(0), B, ranks=[[0, 1], [2, 3]])
    return consistent.explain(torch.mm, x, _laid((8, 8), B, S(1), ranks=[[0, 1], [2, 3]]))


def test_each_axis_has_its_own_candidates() -> None:
    (op,) = pool(4).run(_two_axes)[0].ops
    chosen = [repr(next(o for o in options if o.chosen).signature) for options in op.axes]
    assert chosen == ["S(0), B -> S(0)", "B, S(1) -> S(1)"] and op.nbytes == 0


def _in_place(rank: int) -> Any:
    return consistent.explain(torch.Tensor.add_, _laid((8, 8), S(0)), _laid((8, 8), P))


def test_in_place_only_what_keeps_the_target_is_a_candidate() -> None:
    (op,) = pool(2).run(_in_place)[0].ops
    assert [repr(o.signature) for o in op.axes[0]] == ["S(0), S(0) -> S(0)"]


def _reads_a_value(rank: int) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x

    return consistent.explain(function, _laid((8, 8), S(0)))


def test_what_reads_a_value_is_planned_up_to_there() -> None:
    said = pool(2).run(_reads_a_value)[0]
    assert said["sum"].result == "P" and said.stopped
    assert "planned no further" in repr(said)


def _plain(rank: int) -> None:
    consistent.explain(torch.add, torch.ones(2), 1)


def test_plain_tensors_have_nothing_to_explain() -> None:
    with pytest.raises(TypeError, match="no argument of add is a global tensor"):
        pool(2).run(_plain)
