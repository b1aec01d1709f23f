# %% [markdown]
# # Reading a report and removing a collective
#
# Nothing in a program says "communicate". A report shows which lines sent data, and how much.
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
# Both weights are split along dim 0, their outputs. That looks natural, and it is what one would
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
# Read it from the top: the lines that send most come first. `layout` shows the layouts of an op's
# inputs and outputs, `boxings` what was moved before the op ran, and `where` the line of the
# program. After the first `linear` each rank has half of the hidden columns. The second weight is
# split by rows, which does not fit. The library takes the cheapest way to make it fit: in each call
# it moves the weight from `S(0)` to `S(1)`.
#
# ## Ask why
#
# `explain` plans a call without running it. It lists the layouts of the inputs among which the
# library chooses.

# %%
hidden = F.relu(F.linear(x, w1))
if rank == 0:
    print(consistent.explain(F.linear, hidden, w2))

# %% [markdown]
# Each line has layouts that would give the right result, with what would have to be moved first.
# The arrow marks the line that is taken. The list shows what to change: `S(1), S(1) -> P` moves
# nothing at all if `w2` is split along dim 1 from the start. Each rank then multiplies the columns
# that it has, and gets an addend of the result.
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
# Nothing was sent. The result is `P`: each rank has an addend. It is summed over the ranks when
# something needs its value: a residual added to it, a loss, `item()`. The plan `"tensor"` splits
# every pair of layers in this way.
