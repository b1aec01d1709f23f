# %% [markdown]
# # Random numbers that never change
#
# A random value depends on the seed, on how many random ops ran before, and on the element's
# position in the whole tensor. It does not depend on the number of ranks or on the layout.
#
# ```sh
# torchrun --standalone --nproc_per_node 3 examples/tutorials/random_numbers.py
# ```

# %%
import torch
from torch import nn
from torch.nn import functional as F

import consistent
import mirrored
from consistent import B, S

rank = mirrored.current().rank
placements = [consistent.placement("cpu", ranks) for ranks in ([0], [0, 1], [2, 0, 1])]

# %% [markdown]
# ## The same draw under six layouts

# %%
for p in placements:
    for sbp in (S(0), B):
        torch.manual_seed(3)
        x = consistent.randn(5, placement=p, sbp=sbp)
        values = [f"{value:.3f}" for value in x.tolist()]
        if rank == 0:
            print(f"on {p.size}, {sbp}:", *values)

# %% [markdown]
# ## Dropout
#
# Each rank draws its part of one dropout mask for the whole tensor. So a model with dropout has the
# same losses on any number of ranks.

# %%
torch.manual_seed(0)
weight, inputs = torch.randn(4, 6), torch.randn(8, 6)
for p in placements:
    torch.manual_seed(1)
    x = consistent.distribute(inputs, p, S(0))
    w = consistent.distribute(weight, p, B)
    y = F.dropout(F.linear(x, w), 0.5).square().mean()
    value = y.item()
    if rank == 0:
        print(f"on {p.size}: {value:.4f}")

# %% [markdown]
# ## Initial values
#
# The functions of `torch.nn.init` draw their numbers in the same way. Here a layer's weight is
# drawn again in place.

# %%
sums = []
for p in placements:
    layer = consistent.parallelize(nn.Linear(6, 4), p, {"weight": S(1)})
    torch.manual_seed(2)
    nn.init.xavier_uniform_(layer.weight)
    sums.append(layer.weight.double().sum().item())
if rank == 0:
    print("largest difference of the sums:", f"{max(sums) - min(sums):.0e}")

# %% [markdown]
# ## What you must do
#
# **Use the same seed on every rank**: `torch.manual_seed(0)`, without adding the rank. If seeds
# differ, the first draw of a global tensor raises on every rank. A program that never seeds uses a
# fixed seed, which is the same on all ranks. Plain tensors are still drawn by torch, on each rank
# separately. If they should be equal on all ranks, set the same seed before you draw them.
