"""Program of each of the two ranks of the doctor's self-test.

The ranks try a gather, a reduction, a gradient and a checkpoint. Rank 0 writes its present stage to
the file ``at`` in the given folder, and the results to ``said``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from .. import checkpoint
from ..spec import B, P, S
from ..spec import Placement as place
from ..tensor.making.create import distribute, from_local
from .info import ranks_report
from .process import ranks


def main(folder: Path) -> None:
    """Run the stages of the self-test on this rank; raise AssertionError for a wrong value.

    ``folder`` is where rank 0 writes its progress and the results, for the doctor to read.
    """
    with ranks() as prints:
        stages = (
            ("gather", _check_gather),
            ("reduction", _check_reduction),
            ("gradient", _check_gradient),
        )
        for name, run in (*stages, ("checkpoint", lambda: _check_checkpoint(folder))):
            if prints:
                (folder / "at").write_text(name)
            run()
        ways = ranks_report()
        if prints:
            stage_names = [f"a {name}" for name, _ in stages] + ["a checkpoint"]
            (folder / "said").write_text(json.dumps({"done": stage_names, "ways": ways}))


def _all_ranks():
    kind = "cuda" if torch.cuda.device_count() >= dist.get_world_size() else "cpu"
    return place(kind, range(dist.get_world_size()))


def _rows() -> torch.Tensor:
    return torch.arange(12.0).view(4, 3)


def _check_gather() -> None:
    x = distribute(_rows(), _all_ranks(), S(0))
    assert torch.equal(x.full().cpu(), _rows()), "what was gathered is wrong"


def _check_reduction() -> None:
    placement = _all_ranks()
    shard = torch.full((3,), float(dist.get_rank()), device=placement.type)
    total = sum(range(dist.get_world_size()))
    result = from_local(shard, placement, P).to_global(sbp=B).to_local()
    assert torch.equal(result.cpu(), torch.full((3,), float(total))), "the sum is wrong"


def _check_gradient() -> None:
    x = distribute(_rows(), _all_ranks(), S(0))
    w = distribute(torch.ones(3, 2), _all_ranks(), B).requires_grad_()
    # With matmuls only: an element-wise op would import torch._dynamo, which takes a second.
    y = x @ w
    (y.T @ y).sum().backward()
    plain = torch.ones(3, 2, requires_grad=True)
    z = _rows() @ plain
    (z.T @ z).sum().backward()
    assert torch.equal(w.grad.full().cpu(), plain.grad), "the gradient is wrong"  # pyright: ignore


def _check_checkpoint(folder: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(distribute(torch.ones(2, 2), _all_ranks(), S(0)))
    model.bias = torch.nn.Parameter(distribute(torch.ones(2), _all_ranks(), B))
    path = checkpoint.save(folder / "checkpoints", model=model)
    with torch.no_grad():
        model.weight.zero_()
    checkpoint.load(path, model=model)
    assert model.weight.sum().item() == 4, "what was loaded is wrong"


if __name__ == "__main__":
    arguments = sys.argv[1:] or [tempfile.mkdtemp()]
    main(Path(arguments[0]))
