# %% [markdown]
# # Writing a rule
#
# An op without a rule runs on the whole tensors on every rank, which is right and slow. A rule is
# one line that says how dims of the inputs relate to dims of the output, as in einsum. This program
# writes a rule and shows what the library derives from it.
#
# ```sh
# torchrun --standalone --nproc_per_node 2 examples/tutorials/writing_a_rule.py
# ```

# %%
import torch

import consistent
import mirrored
from consistent import B, S
from consistent.dispatch.plans.plan import clear_plans
from consistent.rules import notation
from consistent.rules.table import ROWS, Row, add_rows

rank = mirrored.current().rank
p = consistent.placement("cpu", [0, 1])

# %% [markdown]
# ## An op without a rule
#
# A report names the ops that ran whole. `torch.inner` is one: it multiplies the rows of one matrix
# by the rows of another. Its inputs are gathered, every rank computes all of it, and the result is
# `B`.

# %%
x = consistent.randn(6, 4, placement=p, sbp=S(0))
y = consistent.randn(5, 4, placement=p, sbp=B)
with consistent.report() as ran:
    before = torch.inner(x, y)
if rank == 0:
    print("ran whole:", ran.whole, "and sent", ran.nbytes, "bytes; the result is", before.sbp)

# %% [markdown]
# ## The rule
#
# The rule is `"mk, nk -> mn"`: there is a row of `x` for each `m`, a row of `y` for each `n`, and
# the op sums over `k`. Everything else follows from the letters. Each line below is a *signature*
# for one axis of the placement: SBPs of the inputs, and the SBP that the output then has.

# %%
if rank == 0:
    for signature in notation.signatures("mk, nk -> mn", [(6, 4), (5, 4)]):
        print(signature)

# %% [markdown]
# A dim whose letter is also in the output may be split in one input; the other input is then whole.
# If the dim that is summed over is split, each rank computes an addend, `P`. The op is linear in
# each input, so one input may also be `P` already.
#
# ## Enter it
#
# In the library a rule is one line in the file of its family under `consistent/rules/`. This
# program adds its rule while it runs, after the op was already called. So the plan that the first
# call has left must be removed.

# %%
add_rows([Row("inner", "mk, nk -> mn", "input other")])
clear_plans()
with consistent.report() as ran:
    after = torch.inner(x, y)
if rank == 0:
    print("ran whole:", ran.whole, "and sent", ran.nbytes, "bytes; the result is", after.sbp)
same = torch.allclose(before, after)  # it reads values, so every rank asks
if rank == 0:
    print("the same values:", same)
del ROWS["inner"]

# %% [markdown]
# ## Mistakes
#
# A mistake in the notation is shown with a caret under it.

# %%
if rank == 0:
    try:
        notation.parse("mk, nk -> mj")
    except ValueError as error:
        print(error)

# %% [markdown]
# A rule that can be parsed may still be wrong. So the library's rules are tested by running them:
# for every signature the inputs are scattered, the op runs on the pieces, and outputs and gradients
# are compared with torch on the whole tensors. [Adding an op](../adding_an_op.md) says how to add
# your rule to that test.
