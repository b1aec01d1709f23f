# Look at: the class and the last two arguments of `Trainer` are all that is new. Training,
# evaluation, checkpoints, resuming and load_best_model_at_end are the Trainer's own, and its files
# are those of one process.
#
#     torchrun --standalone --nproc_per_node 2 examples/hf_trainer.py

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import consistent
from consistent.integrations.accelerate import as_one_process
from consistent.integrations.transformers import Trainer

PLAN = "zero3"


def build() -> GPT2LMHeadModel:
    """A model without dropout, whose numbers plain torch would draw otherwise."""
    torch.manual_seed(0)
    drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, **sizes, **drops)
    ).double()


def texts(count: int, seed: int) -> TensorDataset:
    return TensorDataset(
        torch.randint(50, (count, 12), generator=torch.Generator().manual_seed(seed))
    )


def collate(items: list) -> dict:
    ids = torch.stack([item for (item,) in items])
    return {"input_ids": ids, "labels": ids}


def train(kind: type, folder: Path, resume: bool = False, **spread) -> list[float]:
    """The losses of 8 steps and 2 evaluations; with ``resume`` the last 4 are run again from the
    checkpoint in the middle."""
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=5, per_device_eval_batch_size=5, max_steps=8,
        eval_strategy="steps", eval_steps=4, save_steps=4, logging_steps=1, learning_rate=1e-2,
        load_best_model_at_end=True, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    if not spread:
        as_one_process()  # rank 0 by itself, although there are others
    trainer = kind(
        model=build(), args=args, data_collator=collate,
        train_dataset=texts(23, 0), eval_dataset=texts(7, 1), **spread,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resume else None)
    log = trainer.state.log_history
    return [each[name] for name in ("loss", "eval_loss") for each in log if name in each] + [
        trainer.evaluate()["eval_loss"]  # of the best model
    ]


def difference(folder: Path) -> float:
    """Between the Trainer on rank 0 alone and the one of all ranks, twice: straight, resumed."""
    transformers.utils.logging.set_verbosity_error()
    everywhere = consistent.Placement.all("cpu")
    spread = {"placement": everywhere, "plan": PLAN}
    shared = [train(Trainer, folder / "all", resume, **spread) for resume in (False, True)]
    if dist.get_rank() != 0:
        return 0.0
    alone = train(transformers.Trainer, folder / "alone")
    return max(abs(a - b) for found in shared for a, b in zip(found, alone, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gap = difference(Path(sys.argv[1] if len(sys.argv) > 1 else "out/hf_trainer"))
    if dist.get_rank() == 0:
        print(f"losses as in one process, resumed or not; largest difference: {gap:.1e}")
    dist.destroy_process_group()
