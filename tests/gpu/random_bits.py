"""Random numbers have the bits that the CPU gives for the whole tensor, under every SBP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import consistent
from consistent.forms.native import load as native
from consistent.forms.random import generator
from consistent.spec import B, P, Placement, S
from tests.gpu.world import World, start

SHAPE, LARGE, PERMUTED = (301, 67), (1031, 517), 10007
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SBPS = (B, S(0), S(1), P)
Key = dict[str, int]
Where = dict[str, Any]


def whole(dtype: torch.dtype) -> Tensor:
    """Chances for bernoulli and numbers for dropout: multiples of 1/64 in [0, 1]."""
    return (torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE) % 65 / 64).to(dtype)


def cut(x: Tensor, where: Where) -> Any:
    return consistent.distribute(x, where["placement"], where["sbp"])


# name -> (under a placement and SBP, by the native ops for the whole on the CPU)
DRAWS: dict[str, tuple[Callable[[torch.dtype, Where], Any], Callable[..., Tensor]]] = {
    "rand": (
        lambda dtype, where: consistent.rand(*SHAPE, dtype=dtype, **where),
        lambda dtype, key: native.uniform_(torch.empty(SHAPE, dtype=dtype), **key),
    ),
    "randn": (
        lambda dtype, where: consistent.randn(*SHAPE, dtype=dtype, **where),
        lambda dtype, key: native.normal_(torch.empty(SHAPE, dtype=dtype), **key),
    ),
    "randint": (
        lambda dtype, where: consistent.randint(-9, 99, SHAPE, dtype=dtype, **where),
        lambda dtype, key: native.randint_(torch.empty(SHAPE, dtype=dtype), -9, 99, **key),
    ),
    "bernoulli": (
        lambda dtype, where: torch.bernoulli(cut(whole(dtype), where)),
        lambda dtype, key: native.bernoulli_(torch.empty(SHAPE, dtype=dtype), whole(dtype), **key),
    ),
    "dropout": (
        lambda dtype, where: F.dropout(cut(whole(dtype), where), 0.3),
        lambda dtype, key: native.dropout(whole(dtype), 0.3, **key),
    ),
}
FILLS = ("uniform_", "normal_", "log_normal_", "exponential_", "cauchy_")


def same(made: Tensor, wanted: Tensor) -> bool:
    """Equal to the last bit, the sign of zero and not-a-number included."""
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    if made.dtype != wanted.dtype or made.shape != wanted.shape:
        return False
    kind = sizes[wanted.element_size()]
    return torch.equal(made.detach().cpu().contiguous().view(kind), wanted.view(kind))


def key_after(seed: int) -> Key:
    """What the first random op after this seed draws from."""
    torch.manual_seed(seed)
    found = generator.next_key("a check", None)
    torch.manual_seed(seed)
    return {"seed": found[0], "counter": found[1]}


def global_draws(world: World) -> None:
    placement = Placement(world.device, range(world.size))
    # Seeding resets the count of random ops once there is a global tensor, and key_after counts.
    consistent.zeros((), placement=placement, sbp=B)
    for dtype in DTYPES:
        for name, (draw, reference) in DRAWS.items():
            for sbp in SBPS:
                wanted = reference(dtype, key_after(11))
                made = draw(dtype, {"placement": placement, "sbp": sbp}).full()
                world.expect(same(made, wanted), f"{name} {dtype} {sbp}")
    for sbp in (B, S(0), P):
        wanted = native.randperm(PERMUTED, **key_after(12))
        made = consistent.randperm(PERMUTED, placement=placement, sbp=sbp)
        world.expect(same(made.full(), wanted), f"randperm {sbp}")
        wanted = native.randint_(torch.empty(SHAPE, dtype=torch.int64), 0, 1 << 40, **key_after(13))
        made = consistent.randint(1 << 40, SHAPE, placement=placement, sbp=sbp)
        world.expect(same(made.full(), wanted), f"randint int64 {sbp}")


def cut_fills(world: World) -> None:
    """The native ops by themselves: two halves of each row on the device, the whole on the CPU."""
    rows, columns = LARGE
    for dtype in DTYPES:
        for name in FILLS:
            fill, key = getattr(native, name), {"seed": 5, "counter": 9}
            wanted = fill(torch.empty(LARGE, dtype=dtype), **key)
            halves = []
            for first, last in ((0, 200), (200, columns)):
                out = torch.empty(rows, last - first, dtype=dtype, device=world.device)
                halves.append(fill(out, **key, starts=[0, first], logical_sizes=LARGE))
            world.expect(same(torch.cat(halves, 1), wanted), f"{name} {dtype} in two halves")


def backward_of_dropout(world: World) -> None:
    """Backward draws the mask of forward."""
    placement = Placement(world.device, range(world.size))
    for dtype in DTYPES:
        x = consistent.ones(*SHAPE, dtype=dtype, placement=placement, sbp=S(0), requires_grad=True)
        y = F.dropout(x, 0.5)
        y.sum().backward()
        world.expect(same(x.grad.full(), y.detach().full().cpu()), f"backward of dropout {dtype}")


def main() -> None:
    world = start(__doc__)
    global_draws(world)
    cut_fills(world)
    backward_of_dropout(world)
    world.end()


if __name__ == "__main__":
    main()
