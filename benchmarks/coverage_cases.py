"""One case of op_coverage.py: compares an operator's sample under one layout, in one mode, on one
side with plain torch. It runs on the ranks of a pool."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

Grid = tuple[int, ...]
Entry = int | str | None  # S(d), "P", or B
How = tuple[tuple[Entry, ...], ...]  # for each tensor, for each axis
MODES = ("forward", "backward", "in place")

SKIPPED = re.compile(
    r"^(empty|new_empty|empty_like|new_empty_strided|empty_strided|empty_permuted|to_sparse|sparse\.)"
)
# Our random numbers differ from torch's, and are the same under every layout (tests compare those).
RANDOM = re.compile(
    r"rand|bernoulli|multinomial|normal|dropout|uniform|exponential|geometric|cauchy|poisson|binomial|rrelu|"
    r"fractional|svd_lowrank|pca_lowrank|multi_head_attention_forward"
)


def label(op: Any) -> str:
    """A name that tells variants apart."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


_device = "cpu"


def use(device: str) -> None:
    """Take samples, and lay them out, on "cpu" or "cuda" from now on."""
    global _device
    _device = device


@lru_cache(maxsize=1)
def operators() -> dict[str, Any]:
    """All OpInfos except those that leave memory uninitialised or make sparse tensors."""
    # Torch's tests need it beside the database, which is read with it or without.
    with contextlib.suppress(ImportError):
        import expecttest  # noqa: F401
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    return {label(op): op for op in op_db if op.dtypes and not SKIPPED.match(label(op))}


def dtype_of(op: Any) -> torch.dtype:
    """float32 where the op takes it, else int64, else bool."""
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        if dtype in op.dtypes:
            return dtype
    return next(iter(op.dtypes))


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with each tensor replaced by the function's result for it."""
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


# -- what to run -----------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def samples_of(name: str, count: int) -> list[Any]:
    """``count`` of the operator's samples, spread over its first 24: the first ones are alike."""
    op = operators()[name]
    dtype = dtype_of(op)
    torch.manual_seed(0)
    wants = dtype.is_floating_point and op.supports_autograd
    found = list(itertools.islice(op.sample_inputs(_device, dtype, requires_grad=wants), 24))
    found = [s for s in found if _is_plain(s)]
    step = max(1, len(found) // count)
    return found[::step][:count]


def _is_plain(sample: Any) -> bool:
    tensors = _tensors_of(sample)
    return bool(tensors) and all(t.layout is torch.strided for t in tensors)


def _tensors_of(sample: Any) -> list[torch.Tensor]:
    return tensors_in((sample.input, sample.args, sample.kwargs))


def layouts(tensors: list[torch.Tensor], grid: Grid) -> Iterator[tuple[str, How]]:
    """(name, layout of each tensor): all B; the first tensor, the second, or all that can be, split
    or P. On a grid of two axes, pairs of these for the first tensor and for all."""
    first = tensors[0]
    entries: list[Entry] = list(range(first.ndim))
    summed = first.dtype.is_floating_point and first.dtype.itemsize > 1
    if summed or first.dtype is torch.int64:
        entries.append("P")
    whole = (None,) * len(grid)
    yield "B", (whole,) * len(tensors)
    kinds = [(e,) for e in entries]
    if len(grid) == 2:
        kinds = [k for k in itertools.product([None, *entries], repeat=2) if k != whole]
    for kind in kinds:
        shown = ", ".join("B" if e is None else "P" if e == "P" else f"S({e})" for e in kind)
        alike = [
            kind if t.ndim == first.ndim and t.dtype == first.dtype else whole for t in tensors
        ]
        yield shown, (kind, *[whole] * (len(tensors) - 1))
        if sum(how == kind for how in alike) > 1:
            yield f"{shown} all", tuple(alike)
    if len(tensors) > 1 and len(grid) == 1:
        for d in range(tensors[1].ndim):
            yield f"S({d}) second", (whole, (d,), *[whole] * (len(tensors) - 2))


def is_even(tensors: list[torch.Tensor], how: How, grid: Grid) -> bool:
    """Whether each split cuts into equal pieces."""
    for t, entries in zip(tensors, how, strict=True):
        for d in {e for e in entries if isinstance(e, int)}:
            parts = 1
            for e, n in zip(entries, grid, strict=True):
                parts *= n if e == d else 1
            if t.shape[d] % parts:
                return False
    return True


def plan(rank: int, name: str, count: int, grid: Grid) -> list[tuple[int, str, How, str, bool]]:
    """(sample, layout, how, mode, even) of all cases that plain torch runs."""
    warnings.simplefilter("ignore")
    op, found = operators()[name], []
    for index, sample in enumerate(samples_of(name, count)):
        tensors = _tensors_of(sample)
        modes = []
        for mode in MODES:
            if mode == "in place" and (op.inplace_variant is None or sample.broadcasts_input):
                continue
            if mode == "backward" and not any(t.requires_grad for t in tensors):
                continue
            try:
                expected(name, count, index, mode)
            except Exception:  # noqa: BLE001, S112 - a sample that plain torch does not run is not a case
                continue
            modes.append(mode)
        for (shown, how), mode in itertools.product(layouts(tensors, grid), modes):
            text = f"{shown} of {[tuple(t.shape) for t in tensors]}"
            found.append((index, text, how, mode, is_even(tensors, how, grid)))
    return found


# -- the sides -------------------------------------------------------------------------------------


def addend(x: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    """The addend of a P tensor that rank ``index`` of ``parts`` holds: x, -x or 2x for each
    element. The addends sum to ``x`` without rounding, so that ties stay ties and poles stay
    poles."""
    signs = (
        [2, -1] + [1, -1] * ((parts - 2) // 2) if parts % 2 == 0 else [1] + [1, -1] * (parts // 2)
    )
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(parts, *x.shape, generator=generator).argsort(0)
    times = torch.tensor(signs)[order[index]].to(x.device, x.dtype)
    x = x.detach()
    return torch.where(x.isfinite(), x * times, x if index == 0 else torch.zeros_like(x))


class Ours:
    """Global tensors."""

    def __init__(self, grid: Grid):
        import consistent

        self.lib = consistent
        ranks = torch.arange(dist.get_world_size()).reshape(grid).tolist()
        self.placement = consistent.placement(_device, ranks)

    def make(self, x: torch.Tensor, how: tuple[Entry, ...], requires_grad: bool) -> Any:
        """``x`` as a tensor of this side, in the layout."""
        if x.device.type != _device:  # the op takes it from the host, as a plain tensor
            return x.detach().clone()
        sbp = tuple(
            self.lib.B if e is None else self.lib.P if e == "P" else self.lib.S(e) for e in how
        )
        part = tuple(self.lib.B if e is self.lib.P else e for e in sbp)
        made = self.lib.distribute(x.detach().clone(), self.placement, part)
        for axis, entry in enumerate(how):
            if entry == "P":
                at = self.placement.coordinate_of(dist.get_rank())
                local = addend(made.to_local().clone(), self.placement.shape[axis], at[axis])
                made = self.lib.from_local(local, self.placement, sbp, shape=tuple(x.shape))
        return made.requires_grad_(requires_grad) if requires_grad else made

    def whole(self, x: Any) -> torch.Tensor:
        """The logical value."""
        return x.full() if hasattr(x, "full") and hasattr(x, "sbp") else x


class Rival:
    """DTensor."""

    def __init__(self, grid: Grid):
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh(_device, grid)

    def make(self, x: torch.Tensor, how: tuple[Entry, ...], requires_grad: bool) -> Any:
        """``x`` as a tensor of this side, in the layout."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

        parts = [Replicate() if e is None or e == "P" else Shard(e) for e in how]
        made = distribute_tensor(x.detach().clone(), self.mesh, parts)
        for axis, entry in enumerate(how):
            if entry == "P":
                at = self.mesh.get_coordinate()
                local = addend(made.to_local().clone(), self.mesh.shape[axis], at[axis])
                parts[axis] = Partial()
                made = DTensor.from_local(
                    local, self.mesh, parts, run_check=False, shape=x.shape, stride=x.stride()
                )
        return made.detach().requires_grad_(requires_grad)

    def whole(self, x: Any) -> torch.Tensor:
        """The logical value."""
        return x.full_tensor() if hasattr(x, "full_tensor") else x


@lru_cache(maxsize=4)
def side(who: str, grid: Grid) -> Any:
    """The side called ``who`` on this rank."""
    return Ours(grid) if who == "ours" else Rival(grid)


# -- one case --------------------------------------------------------------------------------------


def _laid_out(sample: Any, how: How, make: Callable[..., Any], grads: bool) -> tuple[Any, ...]:
    """(input, args, kwargs, leaves) of a sample under a layout."""
    position = iter(how)
    leaves: list[Any] = []

    def change(x: torch.Tensor) -> Any:
        leaves.append(make(x, next(position), grads and x.requires_grad))
        return leaves[-1]

    parts = (sample.input, sample.args, sample.kwargs)
    return (*(map_tensors(part, change) for part in parts), leaves)


def _copy(x: torch.Tensor, _: Any, requires_grad: bool) -> torch.Tensor:
    return x.detach().clone().requires_grad_(requires_grad)


def _loss(outs: list[Any], weights: list[Any]) -> Any:
    total: Any = 0
    for x, w in zip(outs, weights, strict=True):
        term = (x * w).sum()
        total = total + (term.abs() if w.is_complex() else term)
    return total


@lru_cache(maxsize=64)
def expected(name: str, count: int, index: int, mode: str) -> Any:
    """What plain torch gives: the result; or (positions of the differentiable outputs, their
    weights in a loss, gradients)."""
    op, sample = operators()[name], samples_of(name, count)[index]
    run = op.inplace_variant if mode == "in place" else op.op
    how = (None,) * len(_tensors_of(sample))
    a, args, kwargs, leaves = _laid_out(sample, how, _copy, mode == "backward")
    torch.manual_seed(0)
    result = run(a, *args, **kwargs)
    if mode != "backward":
        return result
    outs = [(i, x) for i, x in enumerate(tensors_in(result)) if x.requires_grad]
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for _, x in outs]
    weights = [w.to(_device) for w in drawn]
    if outs:
        _loss([x for _, x in outs], weights).backward()
    return [i for i, _ in outs], weights, [x.grad for x in leaves]


def _difference(name: str, count: int, index: int, how: How, who: Any, mode: str) -> str:
    op, sample = operators()[name], samples_of(name, count)[index]
    run = op.inplace_variant if mode == "in place" else op.op
    a, args, kwargs, leaves = _laid_out(sample, how, who.make, mode == "backward")
    torch.manual_seed(0)
    got = run(a, *args, **kwargs)
    want = expected(name, count, index, mode)
    if mode != "backward":
        return compare(map_tensors(got, who.whole), want)
    places, weights, gradients = want
    if not places:
        return ""
    outs = tensors_in(got)
    whole = (None,) * len(how[0])
    made = [who.make(w, whole, False) for w in weights]
    _loss([outs[i] for i in places], made).backward()
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is None:
            continue
        if leaf.grad is None:
            return "no gradient"
        found = compare(who.whole(leaf.grad), gradient)
        if found:
            return f"gradient: {found}"
    return ""


def compare(got: Any, want: Any) -> str:
    """What differs, in words; "" if nothing does."""
    xs, ys = tensors_in(got), tensors_in(want)
    if len(xs) != len(ys):
        return f"{len(xs)} tensors for {len(ys)}"
    if not xs:
        return "" if repr(got) == repr(want) else f"{got!r} for {want!r}"[:200]
    for x, y in zip(xs, ys, strict=True):
        small = y.dtype.itemsize == 1 and y.is_floating_point()
        a, b = (t.detach().float() if small else t.detach() for t in (x, y))
        try:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, equal_nan=True)
        except AssertionError as error:
            return str(error).replace("\n", " ")[:200]
    return ""


def get_ready(rank: int, who: str, grid: Grid) -> None:
    """Do the imports, which take longer than any case."""
    operators()
    side(who, grid)


def run_cases(
    rank: int, name: str, count: int, cases: list[tuple[int, How, str]], who: str, grid: Grid
) -> list[tuple[str, str]]:
    """(outcome, message) on this rank of each (sample, layout, mode)."""
    return [_run_case(name, count, *each, who, grid) for each in cases]


def _run_case(
    name: str, count: int, index: int, how: How, mode: str, who: str, grid: Grid
) -> tuple[str, str]:
    warnings.simplefilter("ignore")
    try:
        difference = _difference(name, count, index, how, side(who, grid), mode)
    except Exception as error:  # noqa: BLE001 - whatever is raised is the outcome
        return "raises", f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
    if difference and RANDOM.search(name):
        return "right", ""
    return ("wrong", difference) if difference else ("right", "")
