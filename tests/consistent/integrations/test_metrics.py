"""torchmetrics and TensorBoard on global tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import consistent
from consistent import B, Placement, S
from tests.ranks import on_ranks

LOGITS = torch.tensor([[2.0, 1, 0], [0, 3, 1], [1, 0, 4], [5, 1, 0], [0, 1, 0.5]])
LABELS = torch.tensor([0, 1, 1, 2, 1])


@on_ranks(2, timeout=180)
def test_metrics_count_each_item_once(rank: int) -> None:
    from torchmetrics import MetricCollection, SumMetric
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

    from consistent.integrations.torchmetrics import logical

    place = Placement("cpu", [0, 1])
    both = logical(MetricCollection([MulticlassAccuracy(3), MulticlassConfusionMatrix(3)]))
    total = logical(SumMetric())
    for rows in (slice(0, 3), slice(3, 5)):
        logits, labels = (consistent.distribute(x[rows], place, S(0)) for x in (LOGITS, LABELS))
        both.update(logits, labels)
        total(labels)
    found = both.compute()
    torch.testing.assert_close(found["MulticlassAccuracy"], torch.tensor((1 + 2 / 3 + 0) / 3))
    assert found["MulticlassConfusionMatrix"].tolist() == [[1, 0, 0], [0, 2, 1], [1, 0, 0]]
    assert total.compute() == 5.0


@on_ranks(2, timeout=180)
def test_rank_0_writes_what_all_ranks_read(rank: int, tmp_path: Path) -> None:
    from consistent.integrations.tensorboard import SummaryWriter

    place = Placement("cpu", [0, 1])
    writer = SummaryWriter(tmp_path)
    loss = consistent.distribute(torch.arange(4.0), place, S(0)).sum()
    assert loss.sbp != (B,)
    writer.add_scalar("loss", loss, 3)
    writer.add_histogram("x", consistent.ones(5, placement=place, sbp=S(0)), 3)
    writer.close()
    if rank == 0:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path)).Reload()
        (event,) = events.Scalars("loss")
        assert (event.value, event.step) == (6.0, 3)
        assert events.Histograms("x")[0].histogram_value.num == pytest.approx(5)
        assert len(list(tmp_path.iterdir())) == 1
