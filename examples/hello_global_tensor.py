# Look at: one logical tensor. Each to_global changes the pieces that the ranks hold, and the value
# stays the same.
#
#     torchrun --standalone --nproc_per_node 2 examples/hello_global_tensor.py

import torch
import torch.distributed as dist

import consistent
from consistent import B, P, S


def shards(x: consistent.GlobalTensor) -> str:
    """The shapes of the ranks' pieces, in the order of ranks."""
    shapes = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, tuple(x.to_local().shape))
    return ", ".join(map(str, shapes))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    everywhere = consistent.Placement.all("cpu")
    value = torch.arange(15.0).view(5, 3)  # every rank has the whole value

    x = consistent.distribute(value, everywhere, S(0))
    unchanged = True
    for sbp in (S(0), B, S(1), P, S(0)):
        x = x.to_global(sbp=sbp)
        pieces = shards(x)
        unchanged &= torch.equal(x.full(), value)
        if dist.get_rank() == 0:
            print(f"{str(sbp):4}: a tensor of shape {tuple(x.shape)}, in pieces {pieces}")
    if dist.get_rank() == 0:
        print(f"value unchanged by boxing: {unchanged}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
