"""A graph with stages against plain torch, in several micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import consistent
from consistent import B, Placement, S
from tests.ranks import on_ranks
from tests.twins import assert_same

from .test_graph import STEPS, Net, batch, graph_of, plainly

WAYS: dict[int, list[tuple[list[int], str]]] = {
    2: [([0], "data"), ([1], "data")],
    4: [([0, 1], "data"), ([2, 3], "tensor")],
}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "one at a time"])
@on_ranks(2, 4)
def test_trains_as_one_process_does(rank: int, name: str) -> None:
    wanted, plain = plainly()
    net = Net()
    size = torch.distributed.get_world_size()
    places = []
    for index, (module, (ranks, plan)) in enumerate(
        zip((net.first, net.second), WAYS[size], strict=True)
    ):
        places.append(Placement("cpu", ranks))
        consistent.parallelize(module, places[-1], plan)
        module.to(consistent.nn.graph.GraphModule).set_stage(  # type: ignore[call-overload]
            stage_id=index, placement=places[-1]
        )
    graph = graph_of(net, micro_batches=3)
    graph.config.set_schedule(name)
    for step in range(STEPS):
        x, y = batch(step)
        first: Any = consistent.distribute(x, places[0], S(0))
        loss, out = graph(first, consistent.distribute(y, places[1], B))
        assert loss.item() == pytest.approx(wanted[step], abs=1e-9)
        assert out.shape == (8, 3)
    assert_same(dict(net.named_parameters()), dict(plain.named_parameters()))
