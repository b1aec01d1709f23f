# Look at: the sbp arguments. The model is cut by columns, the data is whole on every rank, so the
# result is cut by columns.
#
#     torchrun --standalone --nproc_per_node 2 examples/global_tensor_model_parallel.py

import torch
import torch.distributed as dist

import consistent

dist.init_process_group("gloo")
placement = consistent.placement(type="cpu", ranks=[0, 1])
x = consistent.randn(4, 5, placement=placement, sbp=consistent.sbp.broadcast)
w = consistent.randn(5, 8, placement=placement, sbp=consistent.sbp.split(dim=1))
out = torch.matmul(x, w)
same = torch.allclose(out.full(), x.full() @ w.full(), atol=1e-6)
if dist.get_rank() == 0:
    print(tuple(out.shape))  # (4, 8)
    print(f"out is {out.sbp[0]}, this rank holds {tuple(out.to_local().shape)}")
    print(f"equal to one device: {same}")
dist.destroy_process_group()
