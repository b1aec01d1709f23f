# Look at: to_global(placement=P1). It alone moves the data from the first stage to the second, and
# the gradient back. Every rank runs every line; a rank outside a placement follows with shapes
# only.
#
#     torchrun --standalone --nproc_per_node 2 examples/global_tensor_pipeline.py

import torch
import torch.distributed as dist

import consistent
from consistent import B

dist.init_process_group("gloo")
P0 = consistent.placement(type="cpu", ranks=[0])
P1 = consistent.placement(type="cpu", ranks=[1])

w0 = consistent.randn(5, 8, placement=P0, sbp=B, requires_grad=True)
w1 = consistent.randn(8, 3, placement=P1, sbp=B, requires_grad=True)

in_stage0 = consistent.randn(4, 5, placement=P0, sbp=B)
out_stage0 = torch.matmul(in_stage0, w0)
in_stage1 = out_stage0.to_global(placement=P1, sbp=B)
out_stage1 = torch.matmul(in_stage1, w1)
out_stage1.square().sum().backward()

x, a, b = in_stage0.full(), w0.detach().full().requires_grad_(), w1.detach().full().requires_grad_()
expected = x @ a @ b
expected.square().sum().backward()
found = [out_stage1.detach().full(), w0.grad.full(), w1.grad.full()]
gap = max((f - e).abs().max().item() for f, e in zip(found, [expected.detach(), a.grad, b.grad]))
held = [None, None]
dist.all_gather_object(held, [w.to_local().numel() for w in (w0, w1)])
if dist.get_rank() == 0:
    print(tuple(out_stage0.shape), tuple(out_stage1.shape))  # (4, 8) (4, 3)
    print(f"parameters that ranks 0 and 1 hold of the two stages: {held[0]}, {held[1]}")
    print(f"value and gradients as on one device; largest difference: {gap:.1e}")
dist.destroy_process_group()
