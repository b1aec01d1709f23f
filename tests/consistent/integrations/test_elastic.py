"""A Trainer in an elastic job goes on from the last step, in the middle of an epoch and between
two, with the losses, logs and evaluations of one that nothing disturbs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import TrainerCallback, TrainingArguments

from consistent.elastic import Job
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
