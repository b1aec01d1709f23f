# Look at: train. The step takes whole batches and gives whole losses, on any number of ranks;
# split(0) of the batch is what makes it data parallel. Dropout draws the same mask as on one
# device.
#
#     torchrun --standalone --nproc_per_node 2 examples/consistent_strategy.py

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import S
from consistent.flow.data import load

BATCH, STEPS = 100, 6


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding="same")
        self.conv2 = nn.Conv2d(32, 64, 5, padding="same")
        self.hidden = nn.Linear(64 * 7 * 7, 512)
        self.out = nn.Linear(512, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.hidden(x.flatten(1)))
        return self.out(F.dropout(x, 0.5, self.training))


def train(placement, digits):
    """The mean loss of each step."""
    torch.manual_seed(0)
    model = consistent.parallelize(LeNet(), placement)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for k in range(STEPS):
        at = slice(k * BATCH, (k + 1) * BATCH)
        images = consistent.distribute(digits.train_images[at], placement, S(0))
        labels = consistent.distribute(digits.train_labels[at], placement, S(0))
        losses = F.cross_entropy(
            model(images), labels, reduction="none"
        )  # one loss for each sample of the whole batch
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        found.append(losses.detach().numpy().mean().item())
    return found


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    digits = load()
    found = train(consistent.Placement.all("cpu"), digits)
    expected = train(consistent.placement("cpu", [0]), digits)
    if dist.get_rank() == 0:
        gap = max(abs(f - e) for f, e in zip(found, expected))
        print(
            f"loss {found[0]:.3f} to {found[-1]:.3f}, as on one rank; largest difference: {gap:.1e}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
