# %% [markdown]
# # Pipelines
#
# A *stage* is a part of a model, together with the placement where it runs. In this program an
# ordinary model is cut into two stages. A batch is divided into micro-batches, so that both stages
# can work at the same time, on different micro-batches.
#
# ```sh
# torchrun --standalone --nproc_per_node 2 examples/tutorials/pipelines.py
# ```

# %%
import torch
from torch import nn
from torch.nn import functional as F

import consistent
import mirrored

rank = mirrored.current().rank
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
inputs, labels = torch.randn(8, 8), torch.randint(4, (8,))
expected = F.cross_entropy(model(inputs), labels).item()  # one process, for comparison

# %% [markdown]
# ## Cut it
#
# `["2"]` names the module at which the second stage begins. With `"auto"` in its place, the library
# chooses where stages begin, so that they have about equal work.

# %%
P0, P1 = consistent.placement("cpu", [0]), consistent.placement("cpu", [1])
pipe = consistent.nn.pipeline(
    model, [P0, P1], ["2"], loss=F.cross_entropy, micro_batches=4, schedule="1f1b"
)
if rank == 0:
    for name, parameter in model.named_parameters():
        print(f"{name:9} lies on {parameter.placement}")

# %% [markdown]
# ## Run it
#
# `step` runs forward and backward. Every rank passes the whole batch, and gets the loss of the
# whole batch.

# %%
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.zero_grad()
loss = pipe.step(inputs, labels)
optimizer.step()
print(f"loss {loss.item():.5f}, of one process {expected:.5f}")

# %% [markdown]
# ## Look at the schedule
#
# `F2` is the forward of micro-batch 2, `B2` its backward. There is one line for each placement, in
# the order in which it works. The first stage begins with the forwards of two micro-batches. So the
# second stage has another micro-batch to work on while its first gradient is sent back.

# %%
if rank == 0:
    for placement, line in zip((P0, P1), pipe.table.lines, strict=True):
        print(placement, " ".join(f"{kind}{micro_batch}" for kind, _, micro_batch in line))

# %% [markdown]
# ## Inference
#
# The same object runs forward alone.

# %%
with torch.no_grad():
    logits = pipe(inputs)
print("logits", tuple(logits.shape), "on", logits.placement)

# %% [markdown]
# [Pipelines](../pipelines.md) lists all schedules, and says what may stand between stages.
