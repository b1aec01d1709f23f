"""Trainers of transformers and Lightning in an elastic job go on from the last step, in the middle
of an epoch and between two, with the losses, logs and evaluations of one that nothing disturbs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainerCallback, TrainingArguments

from consistent import Placement
from consistent.elastic import Job
from consistent.integrations.lightning import GlobalStrategy
from consistent.integrations.transformers import Trainer
from tests.ranks import on_ranks
from tests.scripts import module_of

EXAMPLE = module_of(Path(__file__).parents[3] / "examples" / "hf_trainer.py")


class GivenUp(Exception):
    """A step, as when a rank is lost."""


class GivesUp(TrainerCallback):
    """At a step, once its update is made."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step + 1 == self.step:
            raise GivenUp


def trainer(folder: Path, job: Job | None, given_up: int = 0) -> Trainer:
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=5, per_device_eval_batch_size=5, max_steps=12,
        eval_strategy="epoch", save_strategy="no", logging_steps=3, learning_rate=1e-2,
        report_to=[], use_cpu=True, disable_tqdm=True, gradient_accumulation_steps=2,
    )  # fmt: skip
    return Trainer(
        model=EXAMPLE.build(), args=args, data_collator=EXAMPLE.collate, plan="data",
        train_dataset=EXAMPLE.texts(23, 0), eval_dataset=EXAMPLE.texts(7, 1), elastic=job,
        callbacks=[GivesUp(given_up)],
    )  # fmt: skip


def log(done: Trainer) -> list[dict[str, float]]:
    """Without times."""
    names = ("loss", "eval_loss", "train_loss", "learning_rate", "grad_norm", "epoch", "step")
    return [{k: v for k, v in row.items() if k in names} for row in done.state.log_history]


@on_ranks(2, timeout=240)
def test_a_trainer_goes_on_from_the_last_step(rank: int, tmp_path: Path) -> None:
    transformers.utils.logging.set_verbosity_error()
    wanted = trainer(tmp_path, None)
    wanted.train()
    job = Job(1, False)
    for step in (2, 5, 7, 7):  # 3 in an epoch: in the first, and after 1 and 2 whole ones
        job.begin(None, lambda: False)
        with pytest.raises(GivenUp):
            trainer(tmp_path, job, step).train()
        assert job.step == step - 1
    job.begin(None, lambda: False)
    found = trainer(tmp_path, job)
    found.train()
    assert len(log(found)) == len(log(wanted))
    for ours, theirs in zip(log(found), log(wanted), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)


class Module(lightning.LightningModule):
    def __init__(self, losses: list[float], given_up: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3)).double()
        self.losses, self.given_up = losses, given_up

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.losses.append(nn.functional.cross_entropy(self.net(batch[0]), batch[1]).item())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.global_step + 1 == self.given_up:
            raise GivenUp

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def fit(folder: Path, job: Job | None, losses: list[float], given_up: int = 0) -> None:
    torch.manual_seed(0)
    x = torch.randn(37, 6, dtype=torch.float64)
    data = TensorDataset(x, x[:, :3].argmax(1))
    done = lightning.Trainer(
        accelerator="cpu", strategy=GlobalStrategy(Placement.all("cpu"), "zero3", elastic=job),
        max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder,
    )  # fmt: skip
    done.fit(Module(losses, given_up), DataLoader(data, 8, shuffle=True), DataLoader(data, 16))


@on_ranks(2, timeout=240)
def test_lightning_goes_on_from_the_last_step(rank: int, tmp_path: Path) -> None:
    wanted: list[float] = []
    fit(tmp_path, None, wanted)  # 3 epochs of 5 steps, and of 3 batches of validation
    job = Job(1, True)
    found: list[float] = []
    for step in (3, 8, 0):
        job.begin(None, lambda: False)
        if step:
            with pytest.raises(GivenUp):
                fit(tmp_path, job, found, step)
            found.pop()  # of the step that was given up
            assert job.step == step - 1
        else:
            fit(tmp_path, job, found)
    assert found == pytest.approx(wanted, abs=1e-12)
