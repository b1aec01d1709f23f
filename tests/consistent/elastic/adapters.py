"""A pipeline, or a Trainer of transformers or Lightning, whose ranks end where a test wants it.

    python -m consistent run --nproc-per-node 3 tests/consistent/elastic/adapters.py FOLDER KIND

Of each step the first rank writes a line to FOLDER/progress, and ``losses.PID`` has the losses of a
process that has come to the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import consistent
from consistent.elastic import Job
from mirrored.every_rank import gather_from_ranks
from mirrored.transports.default import current
from tests.consistent.elastic import places
from tests.consistent.elastic.places import at
from tests.consistent.elastic.progress import Progress
from tests.consistent.pipeline.gpt import GPT, batch, loss_of

STEPS, PAUSE_S = 16, 0.1

folder = Path(sys.argv[1])


def finished(step: int, loss: float) -> None:
    """Say so to the test, and leave it the time to arm a place."""
    if current().rank == 0:
        Progress(folder).write((step, loss))
    time.sleep(PAUSE_S)


def pipeline(job: Job) -> list[float]:
    """A stage on each rank, of a model without a second copy: ``peers=True`` keeps one."""
    stages = [consistent.Placement("cpu", [rank]) for rank in range(job.size)]
    cuts = {1: [], 2: ["blocks.3"], 3: ["blocks.2", "blocks.4"]}[job.size]
    pipe = consistent.nn.pipeline(GPT(6, dropout=0.1), stages, cuts, loss=loss_of, micro_batches=2)
    optimizer = torch.optim.AdamW(pipe.model.parameters(), lr=0.01)
    losses = job.keep(model=pipe.model, optimizer=optimizer).get("losses", [])
    while job.step < STEPS:
        optimizer.zero_grad()
        loss = pipe.step(*batch(job.step))
        optimizer.step()
        at("optimizer")
        # The last stage has the loss.
        loss = next(
            x for x in gather_from_ranks(None if loss is None else float(loss)) if x is not None
        )
        losses = [*losses, loss]
        job.commit(losses=losses)
        finished(job.step, loss)
    return losses


def transformers(job: Job) -> list[float]:
    from transformers import TrainerCallback, TrainingArguments

    from consistent.integrations.transformers import Trainer
    from examples import hf_trainer

    class Places(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            at("optimizer")

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **given: Any) -> None:
            if "loss" in logs:
                finished(state.global_step, logs["loss"])

    args = TrainingArguments(
        str(folder), per_device_train_batch_size=5, max_steps=STEPS, save_strategy="no",
        logging_steps=1, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=hf_trainer.build(), args=args, data_collator=hf_trainer.collate,
        train_dataset=hf_trainer.texts(23, 0), callbacks=[Places()],
        placement=job.placement(), plan="zero3", elastic=job,
    )  # fmt: skip
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def lightning(job: Job) -> list[float]:
    import lightning
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from consistent.integrations.lightning import GlobalStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3)).double()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            at("optimizer")

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Losses(lightning.Callback):
        """Kept with the Trainer's state, as every callback is."""

        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.losses.append(outputs["loss"].item())
            finished(len(self.losses), self.losses[-1])

        def state_dict(self) -> dict[str, Any]:
            return {"losses": self.losses}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.losses = list(state["losses"])

    torch.manual_seed(0)
    x = torch.randn(37, 6, dtype=torch.float64)
    losses = Losses()
    trainer = lightning.Trainer(
        accelerator="cpu", strategy=GlobalStrategy(job.placement(), "zero3", elastic=job),
        max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[losses],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(TensorDataset(x, x[:, :3].argmax(1)), 8, shuffle=True))
    return losses.losses


def main() -> None:
    torch.set_num_threads(1)
    places.begin(folder)
    kinds: dict[str, Callable[[Job], list[float]]] = {
        "pipeline": pipeline, "transformers": transformers, "lightning": lightning,
    }  # fmt: skip
    losses = consistent.elastic.run(kinds[sys.argv[2]], peers=True)
    (folder / f"losses.{os.getpid()}").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
