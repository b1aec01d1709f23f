"""The fused native ops against the expressions of torch that benchmarks/kernels.py times."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from benchmarks.kernels import Sizes, cases
from consistent.forms.native import load as native
from mirrored.codecs import CODECS
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


def vectors(world: World) -> None:
    """Weights and biases in the parts' dtype, wider, and some of each."""
    made = {"device": world.device, "dtype": torch.bfloat16}
    parts = [torch.randn(7, 96, **made) for _ in range(3)]
    bias, weight, shift = (torch.randn(96, **made) for _ in range(3))
    whole = sum(x.double() for x in parts) + bias.double()
    wanted = F.layer_norm(whole, (96,), weight.double(), shift.double())
    for wide in itertools.product((False, True), repeat=3):
        of = [x.float() if w else x for x, w in zip((bias, weight, shift), wide, strict=True)]
        given = {"bias": of[0], "weight": of[1], "norm_bias": of[2], "eps": 1e-5}
        found = native.reduce_shards(parts, 0, 0, 7, norm="layer", normalized=1, **given)[0]
        world.close(found, wanted, 2e-2, f"vectors that are wide: {wide}")


def codecs(world: World) -> None:
    """Messages of one byte a number: the bytes of the CPU, what is left unsent, and sums."""
    for name, dtype in itertools.product(("int8", "fp8"), (torch.float32, torch.bfloat16)):
        codec = CODECS[name]
        for n in (1, 700, 100_003):
            x, rest = torch.randn(n).to(dtype), torch.randn(n)
            at_x, at_rest = x.to(world.device), rest.clone().to(world.device)
            messages = [codec.write(x, rest), codec.write(at_x, at_rest)]
            what = f"{name}, {n} of {dtype}"
            world.expect(torch.equal(messages[1].cpu(), messages[0]), f"bytes of {what}")
            world.expect(torch.equal(at_rest.cpu(), rest), f"unsent of {what}")
            for count in (1, 3, 40):  # 40 are more than one kernel takes
                sums = [codec.read([m] * count, n, dtype) for m in messages]
                world.expect(torch.equal(sums[1].cpu(), sums[0]), f"{count} messages of {what}")


def main() -> None:
    world = start(__doc__)
    torch.manual_seed(world.rank)
    with torch.no_grad():
        compare_all(world)
        slices(world)
        vectors(world)
        codecs(world)
    world.end()


if __name__ == "__main__":
    main()
