"""Is every op right under every split? PyTorch's operator database, ours and DTensor on the same
samples.

    python benchmarks/op_coverage.py --ranks 2 --ops 'softmax|matmul' --samples 3
    python benchmarks/op_coverage.py --ranks 3 --ours-only --json out/coverage.json

For each operator and sample, inputs are laid out as B, S(d) for every d (all tensors that have the
dim together, and the first alone) and P; forward, backward and in place are compared with plain
torch on the whole tensors. Each case ends as right, raises, wrong or hangs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from tests.ranks import RankError, pool

Case = tuple[str, str, str, str]  # mode, layout, outcome, message
SKIPPED = re.compile(
    r"^(empty|new_empty|empty_like|new_empty_strided|empty_strided|empty_permuted|to_sparse|sparse\.)"
)
RANDOM = re.compile(
    r"rand|bernoulli|multinomial|normal|dropout|uniform|exponential|geometric|cauchy|poisson|binomial|rrelu|"
    r"fractional|svd_lowrank|pca_lowrank|multi_head_attention_forward"
)


def find_op(name: str) -> Any:
    """The OpInfo printed as ``name``."""
    return next(op for op in op_db() if label(op) == name)


def op_db() -> list[Any]:
    """All OpInfos."""
    from torch.testing._internal.common_methods_invocations import op_db as ops

    return ops


def label(op: Any) -> str:
    """A name that tells variants apart."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def dtype_of(op: Any) -> torch.dtype:
    """float32 where the op takes it, else int64, else bool."""
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        if dtype in op.dtypes:
            return dtype
    return next(iter(op.dtypes))


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in ``value``, in order."""
    found: list[torch.Tensor] = []
    map_tensors(value, lambda x: found.append(x))
    return found


def layouts(tensors: list[torch.Tensor]) -> Iterator[tuple[str, list[Any]]]:
    """(name, one of None (B), int (S) or "P" per tensor)."""
    yield "B", [None] * len(tensors)
    if not tensors:
        return
    for d in range(tensors[0].ndim):
        yield f"S({d})", [d if i == 0 else None for i in range(len(tensors))]
        if len(tensors) > 1:
            fits = [d if t.ndim == tensors[0].ndim else None for t in tensors]
            if sum(f is not None for f in fits) > 1:
                yield f"S({d}) all", fits
    if tensors[0].dtype.is_floating_point or tensors[0].dtype is torch.int64:
        yield "P", ["P" if i == 0 else None for i in range(len(tensors))]


class Ours:
    """Global tensors."""

    def __init__(self, ranks: int):
        import consistent

        self.lib = consistent
        self.placement = consistent.placement.all("cpu")

    def make(self, x: torch.Tensor, how: Any, requires_grad: bool) -> Any:
        """``x`` laid out."""
        sbp = self.lib.B if how is None else self.lib.P if how == "P" else self.lib.S(how)
        made = self.lib.distribute(x.detach().clone(), self.placement, sbp)
        return made.requires_grad_(requires_grad) if requires_grad else made

    def whole(self, x: Any) -> torch.Tensor:
        """The logical value."""
        return x.full() if hasattr(x, "full") and hasattr(x, "sbp") else x


class Rival:
    """DTensor."""

    def __init__(self, ranks: int):
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh("cpu", (ranks,))

    def make(self, x: torch.Tensor, how: Any, requires_grad: bool) -> Any:
        """``x`` laid out."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

        if how == "P":
            mine = x if dist.get_rank() == 0 else torch.zeros_like(x)
            made = DTensor.from_local(mine.clone(), self.mesh, [Partial()], run_check=False)
        else:
            made = distribute_tensor(
                x.detach().clone(), self.mesh, [Replicate() if how is None else Shard(how)]
            )
        return made.detach().requires_grad_(requires_grad)

    def whole(self, x: Any) -> torch.Tensor:
        """The logical value."""
        return x.full_tensor() if hasattr(x, "full_tensor") else x


def same(got: Any, expected: Any) -> str:
    """Empty, or what differs."""
    xs, ys = tensors_in(got), tensors_in(expected)
    if len(xs) != len(ys):
        return f"{len(xs)} tensors for {len(ys)}"
    if not xs:
        return "" if repr(got) == repr(expected) else f"{got!r} for {expected!r}"[:200]
    for x, y in zip(xs, ys, strict=True):
        try:
            a, b = (
                t.detach().float()
                if t.dtype.itemsize == 1 and t.is_floating_point()
                else t.detach()
                for t in (x, y)
            )
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, equal_nan=True)
        except AssertionError as error:
            return str(error).replace("\n", " ")[:200]
    return ""


def laid_out(
    sample: Any, how: list[Any], side: Any, grads: bool
) -> tuple[Any, Any, Any, list[Any]]:
    """(input, args, kwargs, leaves) of a sample under a layout; ``side`` None: plain."""
    position = iter(how)
    leaves: list[Any] = []

    def change(x: torch.Tensor) -> Any:
        kind = next(position)
        wants = grads and x.requires_grad
        made = (
            x.detach().clone().requires_grad_(wants) if side is None else side.make(x, kind, wants)
        )
        leaves.append(made)
        return made

    return (
        map_tensors(sample.input, change), map_tensors(sample.args, change),
        map_tensors(sample.kwargs, change), leaves,
    )  # fmt: skip


def attempt(run: Callable[[], str]) -> tuple[str, str]:
    """(outcome, message)."""
    try:
        difference = run()
    except Exception as error:  # whatever is raised is the outcome
        return "raises", f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
    return ("wrong", difference) if difference else ("right", "")


def one_case(op: Any, sample: Any, how: list[Any], side: Any, mode: str) -> str:
    """Compare one call with plain torch; the difference, or empty."""
    grads = mode == "backward"
    run = op.inplace_variant if mode == "in place" else op.op
    a, args, kwargs, plain_leaves = laid_out(sample, how, None, grads)
    torch.manual_seed(0)
    expected = run(a, *args, **kwargs)
    a, args, kwargs, leaves = laid_out(sample, how, side, grads)
    torch.manual_seed(0)
    got = run(a, *args, **kwargs)
    if not grads:
        return same(map_tensors(got, side.whole), expected)
    outs = [
        (x, y)
        for x, y in zip(tensors_in(got), tensors_in(expected), strict=True)
        if y.requires_grad
    ]
    if not outs:
        return ""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(y.shape, dtype=y.dtype, generator=generator) for _, y in outs]
    sum((y * w).sum().abs() for (_, y), w in zip(outs, weights, strict=True)).backward()
    total: Any = 0
    for (x, _), w in zip(outs, weights, strict=True):
        total = total + (x * side.make(w, None, False)).sum().abs()
    total.backward()
    for leaf, plain in zip(leaves, plain_leaves, strict=True):
        if plain.grad is None:
            continue
        if leaf.grad is None:
            return "no gradient"
        difference = same(side.whole(leaf.grad), plain.grad)
        if difference:
            return f"gradient: {difference}"
    return ""


def cases(rank: int, name: str, who: str, samples: int, ranks: int) -> list[Case]:
    """All cases of one operator on this rank. Runs in the pool."""
    warnings.simplefilter("ignore")
    op = find_op(name)
    dtype = dtype_of(op)
    side = Ours(ranks) if who == "ours" else Rival(ranks)
    differentiable = dtype.is_floating_point and op.supports_autograd
    found: list[Case] = []
    torch.manual_seed(0)
    for index, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=differentiable)):
        if index >= samples:
            break
        tensors = tensors_in((sample.input, sample.args, sample.kwargs))
        if not tensors or any(t.layout is not torch.strided for t in tensors):
            continue
        for layout, how in layouts(tensors):
            modes = ["forward"]
            if differentiable and any(t.requires_grad for t in tensors):
                modes.append("backward")
            if op.inplace_variant is not None and not sample.broadcasts_input:
                modes.append("in place")
            for mode in modes:
                try:
                    one_case(op, sample, how, _Plain(), mode)
                except Exception:
                    continue  # plain torch does not run it either
                outcome, message = attempt(
                    lambda m=mode, h=how, s=sample: one_case(op, s, h, side, m)
                )
                shapes = [tuple(t.shape) for t in tensors]
                found.append((mode, f"{layout} of {shapes}", outcome, message))
                if mode == "forward" and outcome != "right":
                    break
    return found


class _Plain:
    """Plain torch in the place of a side, to see whether a case runs at all."""

    def make(self, x: torch.Tensor, how: Any, requires_grad: bool) -> torch.Tensor:
        return x.detach().clone().requires_grad_(requires_grad)

    def whole(self, x: Any) -> Any:
        return x


def merge(by_rank: list[list[Case]]) -> list[Case]:
    """The worst outcome of any rank for each case."""
    order = {"right": 0, "raises": 1, "wrong": 2}
    return [max(same_case, key=lambda c: order[c[2]]) for same_case in zip(*by_rank, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ops", default="", help="regular expression of operator names")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first operators")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--json", default="", help="write every case that is not right")
    parser.add_argument("--timeout", type=float, default=60)
    options = parser.parse_args()
    names = [
        label(op)
        for op in op_db()
        if op.dtypes and re.search(options.ops, label(op)) and not SKIPPED.match(label(op))
    ]
    names = names[options.skip :]
    sides = ["ours"] if options.ours_only else ["ours", "DTensor"]
    totals: dict[str, Counter] = {side: Counter() for side in sides}
    by_op: dict[str, dict[str, set[str]]] = {side: defaultdict(set) for side in sides}
    log: list[dict[str, str]] = []
    for name in names:
        for side in sides:
            if RANDOM.search(name) and side == "DTensor":
                continue
            try:
                found = merge(
                    pool(options.ranks).run(
                        cases, name, side, options.samples, options.ranks, timeout=options.timeout
                    )
                )
            except RankError as error:
                found = [("forward", "all", "hangs", str(error)[:2000])]
            if any("Timed out" in message or "pair closure" in message for *_, message in found):
                found = [
                    c
                    if "pair closure" not in c[3] and "Timed out" not in c[3]
                    else (*c[:2], "hangs", c[3])
                    for c in found
                ]
                pool(options.ranks).close()
            for mode, layout, outcome, message in found:
                if RANDOM.search(name) and outcome == "wrong":
                    continue  # other numbers than torch's, by design; tests compare layouts
                totals[side][mode, outcome] += 1
                if outcome != "right":
                    by_op[side][f"{mode} {outcome}"].add(name)
                    log.append(
                        dict(
                            side=side,
                            op=name,
                            mode=mode,
                            layout=layout,
                            outcome=outcome,
                            message=message,
                        )
                    )
                    if side == "ours":
                        print(
                            f"{name:40} {mode:9} {outcome:7} {layout}: {message[:160]}", flush=True
                        )
    for side in sides:
        print(f"\n{side}, {options.ranks} ranks, {len(names)} operators")
        for mode in ("forward", "backward", "in place"):
            counts = {o: totals[side][mode, o] for o in ("right", "raises", "wrong", "hangs")}
            print(f"  {mode:9} " + ", ".join(f"{n} {o}" for o, n in counts.items()))
        for what, ops in sorted(by_op[side].items()):
            print(f"  {what}: {len(ops)} operators: {', '.join(sorted(ops))}")
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(log, indent=1))


if __name__ == "__main__":
    main()
