# Look at: `strategy=GlobalStrategy(placement, plan)` is all that is new. Logged values, metrics
# and checkpoints are those of one process.
#
#     torchrun --standalone --nproc_per_node 2 examples/lightning_fit.py

import logging
import sys
import warnings
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import consistent
from consistent.integrations.lightning import GlobalStrategy
from consistent.integrations.whole import whole


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3)).double()
        self.accuracy = torchmetrics.MeanMetric()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        logits = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]), prog_bar=True)
        right = whole(logits.argmax(1) == batch[1])  # metrics take plain tensors
        self.accuracy.update(right.double())

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.accuracy.compute()))
        self.accuracy.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(folder: Path, strategy: object, resume: bool = False) -> list[float]:
    """Losses, accuracies and logged values of two epochs; with ``resume`` of the second one, which
    goes on from the first's checkpoint."""
    torch.manual_seed(0)
    x = torch.randn(37, 6, dtype=torch.float64)
    data = TensorDataset(x, x[:, :3].argmax(1))
    order = torch.Generator().manual_seed(0)
    batches = DataLoader(data, batch_size=8, shuffle=not resume, generator=order)
    keep = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=-1)
    module = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, callbacks=[keep],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=1.0, num_sanity_val_steps=0,
    )  # fmt: skip
    path = folder / "epoch=0.ckpt" if resume else None
    trainer.fit(module, batches, DataLoader(data, batch_size=20), ckpt_path=path)
    logged = [float(trainer.callback_metrics[name]) for name in ("loss", "val_loss")]
    return module.losses + logged


def difference(folder: Path) -> float:
    """Between Lightning in this process and on all ranks, straight and resumed."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    placement = consistent.Placement.all("cpu")
    gap = 0.0
    for resume in (False, True):
        shared = train(folder / "all", GlobalStrategy(placement, "zero3"), resume)
        alone = train(folder / f"alone-{dist.get_rank()}", "auto", resume)
        gap = max(gap, *(abs(a - b) for a, b in zip(shared, alone, strict=True)))
    return gap


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gap = difference(Path(sys.argv[1] if len(sys.argv) > 1 else "out/lightning_fit"))
    if dist.get_rank() == 0:
        print(f"losses as in one process, resumed or not; largest difference: {gap:.1e}")
    dist.destroy_process_group()
