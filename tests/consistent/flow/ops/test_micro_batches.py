"""Micro-batches: cut, worked on one by one, joined."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import consistent.flow as flow
import consistent.flow.typing as tp
from tests.ranks import pool


def test_unpack_then_pack_is_the_identity() -> None:
    x = torch.arange(12.0).view(6, 2)
    parts = flow.unpack(x, 3)
    assert [tuple(p.shape) for p in parts] == [(2, 2)] * 3
    assert torch.equal(flow.pack(parts, 3), x)


def test_ops_of_the_face_take_micro_batches() -> None:
    x = torch.randn(6, 4)
    y = flow.nn.relu(flow.reshape(flow.unpack(x, 2), (3, 2, 2)))
    assert isinstance(y, flow.MicroBatches)
    assert torch.equal(flow.pack(y, 2), x.relu().reshape(6, 2, 2))


def trained(rank: int, micro: int) -> list[float]:
    flow.clear_default_session()
    config = flow.function_config()
    config.default_data_type(flow.double)

    @flow.global_function(type="train", function_config=config)
    def job(
        x: tp.Numpy.Placeholder((8, 3), dtype=flow.double),
        y: tp.Numpy.Placeholder((8,), dtype=flow.int32),
    ) -> tp.Numpy:
        if micro:
            x, y = flow.unpack(x, micro), flow.unpack(y, micro)
        logits = flow.layers.dense(x, 4, name="d")
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [0.5])).minimize(loss)
        return loss

    numbers = np.random.default_rng(0)
    x, y = (
        numbers.standard_normal((8, 3)),
        numbers.integers(0, 4, 8).astype(np.int32),
    )
    return [float(job(x, y).mean()) for _ in range(4)]


def test_a_job_over_micro_batches_trains_as_over_the_whole_batch() -> None:
    whole = pool(2).run(trained, 0)[0]
    assert whole[-1] < whole[0]
    for found in pool(2).run(trained, 4):
        assert found == pytest.approx(whole, abs=1e-14)


def test_wrong_counts_are_errors() -> None:
    with pytest.raises(ValueError, match="dim 0 of x is 6, and 4 micro-batches are asked for"):
        flow.unpack(torch.ones(6), 4)
    with pytest.raises(ValueError, match="there are 2 micro-batches, and 3 are asked for"):
        flow.pack(flow.unpack(torch.ones(6), 2), 3)
    with pytest.raises(ValueError, match="its arguments are"):
        parts = flow.unpack(torch.ones(6, 2), 2)
        flow.nn.sparse_softmax_cross_entropy_with_logits(flow.unpack(torch.zeros(6), 3), parts)
