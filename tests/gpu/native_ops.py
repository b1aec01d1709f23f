"""The fused native ops against the expressions of torch that benchmarks/kernels.py times."""

from __future__ import annotations

import torch

from benchmarks.kernels import Sizes, cases
from consistent.forms.native import load as native
from tests.gpu.world import World, start

SIZES = (Sizes(64, 512, 33, 700, 40), Sizes(3, 1000, 5, 9, 1024))
# bf16: torch rounds after each op, ours once.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def compare_all(world: World) -> None:
    for dtype, tolerance in TOLERANCES.items():
        for sizes in SIZES:
            for case in cases(dtype, world.device, sizes):
                made, wanted = case.ours(), case.theirs(*case.tensors)
                assert isinstance(made, torch.Tensor) and isinstance(wanted, torch.Tensor)
                world.expect(made.dtype == wanted.dtype, f"dtype of {case.name}, {dtype}")
                world.expect(made.device.type == world.device, f"device of {case.name}")
                world.close(made, wanted, tolerance, f"{case.name}, {dtype}, {sizes}")


def slices(world: World) -> None:
    """A sum of which a rank keeps a part of the rows, or of the columns."""
    parts = [torch.randn(96, 200, device=world.device, dtype=torch.float64) for _ in range(8)]
    whole = sum(parts[1:], parts[0])
    for dim, first, size in ((0, 13, 40), (1, 64, 72), (1, 199, 1), (0, 5, 0)):
        made = native.reduce_shards(parts, dim, first, size)[0]
        world.close(made, whole.narrow(dim, first, size), 1e-13, f"slice of dim {dim} at {first}")


def main() -> None:
    world = start(__doc__)
    torch.manual_seed(world.rank)
    with torch.no_grad():
        compare_all(world)
        slices(world)
    world.end()


if __name__ == "__main__":
    main()
