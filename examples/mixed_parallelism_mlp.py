# Look at: PLAN. The first layer is data parallel; the output layer is model parallel: its weight is
# stored (out, in), so S(0) gives each rank some of the classes. The loss over split classes needs
# no rank to have all logits.
#
#     torchrun --standalone --nproc_per_node 2 examples/mixed_parallelism_mlp.py

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import S
from consistent.flow.data import load

BATCH, STEPS = 100, 20
PLAN = {"dense2.*": S(0)}  # every other parameter is B


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense1 = nn.Linear(784, 512)
        self.dense2 = nn.Linear(512, 10)

    def forward(self, x):
        return self.dense2(F.relu(self.dense1(x.flatten(1))))


def train(placement, plan, digits):
    """The loss of each step, and the model."""
    torch.manual_seed(0)
    model = consistent.parallelize(MLP(), placement, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for k in range(STEPS):
        at = torch.arange(k * BATCH, (k + 1) * BATCH) % len(digits.train_labels)
        images = consistent.distribute(digits.train_images[at], placement, S(0))
        labels = consistent.distribute(digits.train_labels[at], placement, S(0))
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, model


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    digits = load()
    found, model = train(consistent.Placement.all("cpu"), PLAN, digits)
    expected, _ = train(consistent.placement("cpu", [0]), {}, digits)
    if dist.get_rank() == 0:
        gap = max(abs(f - e) for f, e in zip(found, expected))
        print(
            f"this rank holds {tuple(model.dense2.weight.to_local().shape)} of the output layer's "
            "weight"
        )
        print(
            f"loss {found[0]:.3f} to {found[-1]:.3f}, as on one rank; largest difference: {gap:.1e}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
