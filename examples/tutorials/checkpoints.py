# %% [markdown]
# # Checkpoints and the number of ranks
#
# A checkpoint is written in pieces by the ranks that hold them, and is read under any other
# placement, plan and number of ranks. This program saves on four ranks and loads on two of them
# under another plan, and then as plain modules.
#
# ```sh
# torchrun --standalone --nproc_per_node 4 examples/tutorials/checkpoints.py
# ```

# %%
import torch
from torch import nn
from torch.nn import functional as F

import consistent
import mirrored
from consistent import S, checkpoint

rank = mirrored.current().rank


def build(placement=None, plan=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    if placement is not None:
        model = consistent.parallelize(model, placement, plan)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


torch.manual_seed(1)
inputs, labels = torch.randn(12, 6), torch.randint(3, (12,))


def step(model, optimizer, placement=None):
    x, y = inputs, labels
    if placement is not None:
        x, y = (consistent.distribute(t, placement, S(0)) for t in (x, y))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return f"{loss.item():.5f}"


# %% [markdown]
# ## Save
#
# The model trains for two steps on four ranks. Under the plan `"zero3"` each rank has one shard of
# every parameter and of its optimizer state. Every rank calls `save`. The folder is either complete
# or absent: it is written under another name, and renamed at the end.

# %%
four = consistent.placement("cpu", [0, 1, 2, 3])
model, optimizer = build(four, "zero3")
losses = [step(model, optimizer, four) for _ in range(2)]
checkpoint.save("run", model=model, optimizer=optimizer, step=2)
expected = [step(model, optimizer, four) for _ in range(2)]
if rank == 0:
    print("trained", *losses, "then", *expected)

# %% [markdown]
# ## Go on with fewer ranks and another plan
#
# The model is now on two of the four ranks, and its plan splits the weights inside its layers. The
# optimizer's state gets the layout of its parameters. The two other ranks run the same program:
# they hold no part of the model, and know the shape of every tensor.

# %%
two = consistent.placement("cpu", [0, 1])
model, optimizer = build(two, {"0.*": S(0), "2.weight": S(1)})
state = checkpoint.load("run", model=model, optimizer=optimizer)
losses = [step(model, optimizer, two) for _ in range(2)]
if rank == 0:
    print("step", state["step"], "was read; on two ranks", *losses)

# %% [markdown]
# ## Go on without the library's tensors
#
# The same folder loads into plain modules of one process.

# %%
model, optimizer = build()
checkpoint.load("run", model=model, optimizer=optimizer)
losses = [step(model, optimizer) for _ in range(2)]
if rank == 0:
    print("plain modules", *losses)

# %% [markdown]
# ## Files for others
#
# `save_full` writes one file of safetensors, tensor by tensor, without holding the whole model on
# one rank. [Checkpoints](../checkpoints.md) lists the other formats that are read and written.

# %%
checkpoint.save_full(build(four, "zero3")[0], "model.safetensors")
if rank == 0:
    from safetensors.torch import load_file

    print({name: tuple(value.shape) for name, value in load_file("model.safetensors").items()})
