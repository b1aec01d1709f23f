# %% [markdown]
# # Your own model in three lines
#
# Three lines turn a training program for one process into one for many ranks: a placement, one call
# for the model, one call for the data.
#
# ```sh
# torchrun --standalone --nproc_per_node 2 examples/tutorials/your_own_model.py
# ```
#
# This is the program for one process: a model, its data, a loop.

# %%
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import consistent


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        return self.head(self.body(x))


def data():
    x = torch.randn(100, 16, generator=torch.Generator().manual_seed(2))
    order = torch.Generator().manual_seed(3)
    dataset = TensorDataset(x, x[:, :4].argmax(1))
    return DataLoader(dataset, batch_size=25, shuffle=True, generator=order)


def train(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss


# %% [markdown]
# Now the three lines are added. The batch size stays 25, because it counts the items of all ranks
# together. Each rank reads only its part of the batch (13 and 12 items on two ranks).

# %%
everywhere = consistent.placement("cpu", [0, 1])

torch.manual_seed(0)
model = consistent.parallelize(Classifier(), everywhere, "zero3")
loss = train(model, consistent.data.loader(data(), everywhere))
print(f"loss {loss.item():.4f}")

# %% [markdown]
# `loss` is a global tensor. It is partial (`P`): each rank has an addend of it. `item()` gives the
# sum, on every rank, so **every rank must call it**. Printing the tensor itself shows what this
# rank has, and sends nothing.

# %%
print(loss.sbp, "a scalar of shape", tuple(loss.shape))

# %% [markdown]
# A *plan* says which layout each parameter has. It can be printed, and saved to a YAML file. After
# editing the file, you can pass the plan to `parallelize` in place of the plan's name.

# %%
print(consistent.plan_of(model))

# %% [markdown]
# To use a value on one rank only, read it on all ranks and print it on one. `full()` gives the
# whole value as a plain tensor.

# %%
weight = model.head.weight.full()
print(type(weight).__name__, tuple(weight.shape), "of which this rank keeps", end=" ")
print(tuple(model.head.weight.to_local().shape))
