"""Where ops run: machine:device texts, nesting, and tensors that move to their op."""

from __future__ import annotations

from typing import Any

import pytest

import consistent.flow as flow
from consistent import B, S
from tests.ranks import pool, simulate


def ranks_of(rank: int, text: Any) -> list[int]:
    return flow.scope.placement("cpu", text).placement.ranks.tolist()


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0:0", [0]), ("0:1", [1]), ("1:0", [2]), ("1:0-1", [2, 3]), (["0:1", "1:0-1"], [1, 2, 3])],
)
def test_text_names_ranks_machine_by_machine(
    text: Any, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert simulate(ranks_of, 4, text) == [ranks] * 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "names no devices"),
        ("0:1-", "names no devices"),
        ("0:4", "devices 4 to 4"),
        ("2:0", "machine 2"),
        ("0:1-0", "devices 1 to 0"),
    ],
)
def test_text_that_names_no_rank_is_an_error(
    text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=words):
        simulate(ranks_of, 4, text)


def nested(rank: int) -> Any:
    outer, inner = flow.scope.placement("cpu", "0:0-1"), flow.scope.placement("cpu", "0:1")
    found = []
    with outer:
        found.append(flow.ones(2).placement)
        with inner, inner:
            found.append(flow.ones(2, sbp=B).placement)
        found.append(flow.ones(2).placement)
    return [p.ranks.tolist() for p in found], type(flow.ones(2)).__name__


def test_the_innermost_scope_says_where_new_tensors_go() -> None:
    assert pool(2).run(nested) == [([[0, 1], [1], [0, 1]], "Tensor")] * 2


def relayed(rank: int) -> Any:
    x = flow.randn(4, 3, placement=flow.placement("cpu", [0, 1]), sbp=S(0))
    with flow.scope.placement("cpu", "0:1"):
        y = flow.nn.relu(x)
    stays = flow.nn.relu(y)
    labels = flow.zeros(4, placement=flow.placement("cpu", [0, 1]), sbp=S(0), dtype=flow.int64)
    met = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, stays)
    same = bool((y.full() == x.full().relu()).all())
    return [t.placement.ranks.tolist() for t in (y, stays, met)], same


def test_ops_run_where_the_scope_says_and_outside_where_their_data_is() -> None:
    assert pool(2).run(relayed) == [([[1], [1], [0, 1]], True)] * 2


def test_views_print_as_they_are_typed() -> None:
    assert repr(flow.scope.mirrored_view()) == "scope.mirrored_view()"
    assert repr(flow.distribute.consistent_strategy()) == "scope.consistent_view()"
