# Look at: forward. The convolutions are data parallel on all ranks, the hidden layer is on rank 0,
# the output layer on rank 1: three placements, and to_global where the data moves between them.
# Backward moves the gradients back by itself.
#
#     torchrun --standalone --nproc_per_node 2 examples/mixed_parallelism_lenet.py

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import B, S
from consistent.flow.data import load

BATCH, STEPS = 100, 5


class LeNet(nn.Module):
    """LeNet with each layer on the placement where it runs."""

    def __init__(self, everywhere, first, second):
        super().__init__()
        self.first, self.second = first, second
        convolutions = [nn.Conv2d(1, 32, 5, padding="same"), nn.Conv2d(32, 64, 5, padding="same")]
        self.convolutions = consistent.parallelize(nn.ModuleList(convolutions), everywhere)
        self.hidden = consistent.parallelize(nn.Linear(64 * 7 * 7, 512), first)
        self.out = consistent.parallelize(nn.Linear(512, 10), second)

    def forward(self, x):
        for layer in self.convolutions:
            x = F.max_pool2d(F.relu(layer(x)), 2)
        x = x.flatten(1).to_global(placement=self.first, sbp=B)
        x = F.dropout(F.relu(self.hidden(x)), 0.5, self.training)
        return self.out(x.to_global(placement=self.second, sbp=B))


def train(everywhere, first, second, digits):
    """The loss of each step."""
    torch.manual_seed(0)
    model = LeNet(everywhere, first, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for k in range(STEPS):
        at = slice(k * BATCH, (k + 1) * BATCH)
        images = consistent.distribute(digits.train_images[at], everywhere, S(0))
        labels = consistent.distribute(digits.train_labels[at], second, B)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    digits = load()
    rank0, rank1 = consistent.placement("cpu", [0]), consistent.placement("cpu", [1])
    found = train(consistent.Placement.all("cpu"), rank0, rank1, digits)
    expected = train(rank0, rank0, rank0, digits)
    if dist.get_rank() == 0:
        gap = max(abs(f - e) for f, e in zip(found, expected))
        print(
            f"loss {found[0]:.3f} to {found[-1]:.3f}, as on one rank; largest difference: {gap:.1e}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
