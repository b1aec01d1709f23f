# Look at: `Accelerator(placement, plan)` is all that is new in a loop written for accelerate;
# `prepare` makes model, optimizer and batches global, `gather_for_metrics` gives whole values, and
# `save_state` writes each rank's shards, which any number of ranks loads.
#
#     torchrun --standalone --nproc_per_node 2 examples/accelerate_loop.py

import sys
from pathlib import Path

import accelerate
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import consistent
from consistent.integrations.accelerate import Accelerator, as_one_process


def train(accelerator: accelerate.Accelerator, folder: Path | None = None) -> list[float]:
    """Losses of two epochs and the accuracy; the second epoch is run twice from a saved state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    x = torch.randn(37, 6, dtype=torch.float64)
    data = TensorDataset(x, x[:, :3].argmax(1))
    batches = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)

    def epoch() -> list[float]:
        losses = []
        for inputs, labels in batches:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        return losses

    losses = epoch()
    if folder is not None:
        accelerator.save_state(str(folder))
    losses += epoch()
    if folder is not None:
        accelerator.load_state(str(folder))
        again = epoch()
        assert again == losses[-len(again) :], "resumed training has other losses"
    right = [
        accelerator.gather_for_metrics((model(i).argmax(1), j)) for i, j in DataLoader(data, 50)
    ]
    return [*losses, sum(float((a == b).double().mean()) for a, b in right)]


def difference(folder: Path) -> float:
    """Between accelerate in this process and on all ranks."""
    placement = consistent.Placement.all("cpu")
    shared = train(Accelerator(placement, "zero3", cpu=True), folder)
    as_one_process()
    alone = train(accelerate.Accelerator(cpu=True))
    return max(abs(a - b) for a, b in zip(shared, alone, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gap = difference(Path(sys.argv[1] if len(sys.argv) > 1 else "out/accelerate_loop"))
    if dist.get_rank() == 0:
        print(f"losses as in one process; largest difference: {gap:.1e}")
    dist.destroy_process_group()
