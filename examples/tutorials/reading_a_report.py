# %% [markdown]
# # Reading a report and removing a collective
#
# Nothing in a program says "communicate". A report says where it did, and how many bytes it sent.
#
# ```sh
# torchrun --standalone --nproc_per_node 2 examples/tutorials/reading_a_report.py
# ```

# %%
import torch
from torch.nn import functional as F

import consistent
import mirrored
from consistent import B, S

rank = mirrored.current().rank
p = consistent.placement("cpu", [0, 1])


def mlp(x, w1, w2):
    return F.linear(F.relu(F.linear(x, w1)), w2)


# %% [markdown]
# ## A first layout
#
# Both weights are cut along their outputs, dim 0. That looks natural, and it is what one would
# write first.

# %%
torch.manual_seed(0)
x = consistent.randn(256, 32, placement=p, sbp=B)
w1 = consistent.randn(512, 32, placement=p, sbp=S(0))
w2 = consistent.randn(32, 512, placement=p, sbp=S(0))

with consistent.report() as ran:
    mlp(x, w1, w2)
if rank == 0:
    print(ran)

# %% [markdown]
# Read it from the top: the lines that send most come first. `layout` is what went in and what came
# out, `boxings` what was moved before the op ran. `where` is the line of the program. After the
# first `linear` each rank has half of the hidden columns, and the second weight is cut in rows,
# which does not fit. The library took the cheapest way to make it fit: it cuts the weight again, in
# each call.
#
# ## Ask why
#
# `explain` plans a call without running it, and lists what else was possible.

# %%
hidden = F.relu(F.linear(x, w1))
if rank == 0:
    print(consistent.explain(F.linear, hidden, w2))

# %% [markdown]
# Each line is a layout that would give the right result, with what would have to be moved first.
# The arrow marks the one that is taken. It says what to do: `S(1), S(1) -> P` moves nothing at all
# if `w2` is cut along dim 1 from the start. Each rank then multiplies the columns that it has, and
# gets an addend of the result.
#
# ## Change one word

# %%
w2 = w2.to_global(sbp=S(1))
with consistent.report() as ran:
    y = mlp(x, w1, w2)
if rank == 0:
    print(ran)
    print("the result is", y.sbp)

# %% [markdown]
# Nothing was sent. The result is `P`, and it is reduced when something needs its value: a residual
# added to it, a loss, `item()`. This is how the plan `"tensor"` cuts every pair of layers.
