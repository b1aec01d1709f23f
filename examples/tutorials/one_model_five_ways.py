# %% [markdown]
# # Data parallel to 3-D parallel
#
# One small model is trained in five ways: with data parallelism, with ZeRO-3, with tensor
# parallelism, with data and tensor parallelism together, and at last with pipeline stages as well.
# The model's code and the training loop are written once, and the losses are always the same.
#
# ```sh
# torchrun --standalone --nproc_per_node 8 examples/tutorials/one_model_five_ways.py
# ```

# %%
import torch
from torch import nn
from torch.nn import functional as F

import consistent
import mirrored
from consistent import B, S

rank = mirrored.current().rank


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Block(16), Block(16), nn.Linear(16, 4))


torch.manual_seed(1)
inputs, labels = torch.randn(16, 8), torch.randint(4, (16,))


def train(model, inputs, labels):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(f"{loss.item():.4f}")
    return " ".join(losses)


if rank == 0:
    print("one process      ", train(build(), inputs, labels))

# %% [markdown]
# ## Data parallel
#
# A placement names the ranks. `"data"` keeps every parameter whole on each of them, and the batch
# is split along dim 0, which is written `S(0)`. So each rank computes the gradient of its part of
# the batch. The gradient of a parameter is the sum of these over the ranks, which is computed in
# backward.

# %%
all_ranks = consistent.placement("cpu", range(8))
x = consistent.distribute(inputs, all_ranks, S(0))
y = consistent.distribute(labels, all_ranks, S(0))

model = consistent.parallelize(build(), all_ranks, "data")
losses = train(model, x, y)
if rank == 0:
    print("data             ", losses)
    print("each rank holds", tuple(x.to_local().shape), "of the batch", tuple(x.shape))

# %% [markdown]
# ## ZeRO
#
# `"zero3"` splits each parameter, its gradient and its optimizer state over the ranks. A module's
# parameters are gathered while it runs, and once more in backward.

# %%
model = consistent.parallelize(build(), all_ranks, "zero3")
losses = train(model, x, y)
if rank == 0:
    up = model[1].up.weight
    print("zero3            ", losses)
    print("weight", tuple(up.shape), up.sbp, "of which a rank keeps", tuple(up.to_local().shape))

# %% [markdown]
# ## Tensor parallel
#
# A plan may also be a dict from patterns of parameter names to SBPs. Here `up` is split along its
# outputs and `down` along its inputs, so that a block needs one all-reduce in forward. Everything
# else stays whole (`B`).

# %%
cut = {"*.up.*": S(0), "*.down.weight": S(1)}
model = consistent.parallelize(build(), all_ranks, cut)
losses = train(
    model,
    consistent.distribute(inputs, all_ranks, B),
    consistent.distribute(labels, all_ranks, B),
)
if rank == 0:
    print("tensor           ", losses)

# %% [markdown]
# ## Both: a grid with two axes
#
# A placement may be a grid. Each of its axes has an SBP of its own: the batch is split along the
# axis `dp`, and the weights along the axis `tp`.

# %%
grid = consistent.placement("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], axes=("dp", "tp"))
plan = {name: (B, sbp) for name, sbp in cut.items()}
model = consistent.parallelize(build(), grid, plan)
losses = train(
    model,
    consistent.distribute(inputs, grid, (S(0), B)),
    consistent.distribute(labels, grid, (S(0), B)),
)
if rank == 0:
    print("data x tensor    ", losses)
    print("up.weight is", model[1].up.weight.sbp, "on", grid)

# %% [markdown]
# ## All three: stages that are grids
#
# `pipeline` cuts the same model into stages. Each stage has its own placement, here a grid of two
# by two, and its own plan. The batch is divided into four micro-batches, on which the stages work
# at the same time.

# %%
first = consistent.placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))
second = consistent.placement("cpu", [[4, 5], [6, 7]], axes=("dp", "tp"))
model = build()
pipe = consistent.nn.pipeline(
    model, [first, second], ["2"], loss=F.cross_entropy, micro_batches=4, plan=plan
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = pipe.step(inputs, labels)
    optimizer.step()
    losses.append(f"{loss.item():.4f}")
if rank == 0:
    print("data x tensor x 2 stages", " ".join(losses))
