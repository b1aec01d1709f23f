# %% [markdown]
# # Mirrored and consistent together
#
# A program can treat many devices in two ways. Under the *mirrored* view every rank owns a separate
# tensor, and the program sends data by explicit calls, as with DDP. Under the *consistent* view
# there is one tensor, of which the ranks hold pieces. A program may use both.
#
# ```sh
# torchrun --standalone --nproc_per_node 2 examples/tutorials/two_views.py
# ```

# %%
import torch
from torch import nn

import mirrored
from consistent import B, P, S

rank = mirrored.current().rank

# %% [markdown]
# ## A list with one element on each device

# %%
parts = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
x = mirrored.scatter(parts)  # element k goes to rank k
print("my element:", x.to_local().tolist(), "twice:", (x * 2).to_local().tolist())

# %% [markdown]
# An op on mirrored tensors is torch's own, and runs on this rank alone. Collectives are functions
# that take plain tensors.

# %%
total = mirrored.all_reduce(x.to_local(), ranks=(0, 1))
print("sum over ranks:", total.tolist())

# %% [markdown]
# ## From one view to the other
#
# `to_global` makes one global tensor of the ranks' elements. Its argument says how they make it up:
# as pieces, `S(0)`, or as addends, `P`.

# %%
pieces, addends = x.to_global(S(0)), x.to_global(P)
print("as pieces:", pieces.full().tolist(), "as addends:", addends.full().tolist())

# %% [markdown]
# `to_mirrored` goes back: each rank gets the part that it holds, as its own element.

# %%
back = pieces.to_global(sbp=B).to_mirrored()
print("back:", back.to_local().tolist())

# %% [markdown]
# ## Where this helps
#
# A model under DDP computes under the mirrored view. Its loss over the whole batch, or a metric, is
# easier to write under the consistent view.

# %%
torch.manual_seed(0)
model = mirrored.DataParallel(nn.Linear(2, 1))
batch = mirrored.from_local(torch.full((3, 2), float(rank)))
y = mirrored.from_local(model(batch.to_local()).detach()).to_global(S(0))
print("outputs of all ranks:", tuple(y.shape), f"mean {y.mean().item():.4f}")
