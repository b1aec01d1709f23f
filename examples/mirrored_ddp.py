# Look at: DataParallel and scatter, the two lines of the mirrored view. Every rank has a copy of
# the model and its own part of each batch; ops are local, and torch's DistributedDataParallel
# averages the gradients while backward runs.
#
#     torchrun --standalone --nproc_per_node 2 examples/mirrored_ddp.py

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import mirrored
from consistent.flow.data import load

BATCH, STEPS = 100, 40


def build() -> nn.Module:
    """A model with the same initial values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def step(model, optimizer, images, labels):
    """A training step; returns the loss of each sample."""
    losses = F.cross_entropy(model(images), labels, reduction="none")
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()
    return losses.detach()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    digits = load()
    single, copies = build(), mirrored.DataParallel(build())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (single, copies)]
    gap = 0.0
    for k in range(STEPS):
        at = torch.arange(k * BATCH, (k + 1) * BATCH) % len(digits.train_labels)
        images, labels = digits.train_images[at], digits.train_labels[at]
        expected = step(single, optimizers[0], images, labels).mean()
        parts = [mirrored.scatter(x.chunk(dist.get_world_size())) for x in (images, labels)]
        mine = step(copies, optimizers[1], *parts)  # this rank's element
        found = torch.cat(mine.to_list()).mean()
        gap = max(gap, abs(found - expected).item())
    if dist.get_rank() == 0:
        print(
            f"this rank works on {len(mine)} of {BATCH} samples; loss after {STEPS} steps: "
            f"{found:.3f}"
        )
        print(f"loss as in one process; largest difference: {gap:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
