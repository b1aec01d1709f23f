"""Programs drawn from a seed, with what real ones do beside computing: functions of the user's own,
writes through views in every grad mode, errors that are caught, tied weights in stages, batches of
dicts and texts. Each runs on plain and on global tensors.

``check(rank, seed, grid, kinds)`` runs one on a rank of a pool; ``benchmarks/drawn_programs.py``
runs thousands.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import consistent
from consistent import B, P, Placement, S
from consistent.nn import pipeline
from tests.consistent.pipeline.gpt import GPT, batch, loss_of
from tests.consistent.torch_patches.functions_of_users import BLOCKS, PLANS, loss, make, model
from tests.twins import Laid, assert_same, randn

RIGHT, ERROR, DIFFERENT, DROPPED = "right", "error", "different", "dropped"
Outcome = tuple[str, str]


def check(rank: int, seed: int, grid: Any, kinds: Sequence[str]) -> Outcome:
    """What comes of the program of ``seed`` on the ranks of ``grid``."""
    kind = random.Random(seed).choice(kinds)
    try:
        wanted = _run(kind, seed, Laid(None))
    except Exception as error:
        return DROPPED, f"{kind} {seed}: {error}"
    try:
        given = _run(kind, seed, Laid(Placement("cpu", grid)))
        assert_same(given, wanted, rtol=1e-6, atol=1e-8)
    except AssertionError as error:
        return DIFFERENT, f"{kind} {seed}: {error}"
    except Exception as error:
        return ERROR, f"{kind} {seed}: {type(error).__name__}: {error}"
    return RIGHT, kind


def _run(kind: str, seed: int, at: Laid) -> Any:
    torch.manual_seed(seed)
    return KINDS[kind](random.Random(seed), at)


# -- tensors ---------------------------------------------------------------------------------------


class Steps:
    """A program on matrices of one shape. What is drawn depends on the seed alone."""

    def __init__(self, rng: random.Random, at: Laid) -> None:
        self.rng, self.at, self.made = rng, at, 0
        self.shape = rng.randint(1, 6), rng.randint(2, 5)
        self.leaves = [self.new().requires_grad_() for _ in range(rng.randint(1, 3))]
        self.live = [x * 1 for x in self.leaves]
        self.found: list[Any] = []

    def new(self, *shape: int) -> Any:
        """A tensor in a drawn layout."""
        self.made += 1
        laid = self.rng.choice([(B, B), (S(0), B), (S(0), P), (P, S(0)), (P, B), (S(0), S(0))])
        if len(shape or self.shape) > 1:
            laid = self.rng.choice([laid, (S(1), B), (S(0), S(1)), (S(1), S(0)), (S(1), P)])
        return self.at(randn(*(shape or self.shape), seed=self.made), *laid)

    def any(self) -> Any:
        return self.rng.choice(self.live[-4:])

    def run(self, statements: Sequence[Callable[[Steps], None]], count: int) -> Any:
        for _ in range(count):
            self.rng.choice(statements)(self)
        total: Any = sum(
            (x * randn(*self.shape, seed=77 + i)).sum() for i, x in enumerate(self.live)
        )
        total.sin().backward()
        return self.found, [x.detach() for x in self.live], [x.grad for x in self.leaves]


def compute(steps: Steps) -> None:
    x, y = steps.any(), steps.any()
    ops = [
        lambda: x.sin() * y, lambda: x + y.mean(0), lambda: x.softmax(1), lambda: x @ (y.T @ x),
        lambda: x - y.amax(1, keepdim=True), lambda: torch.where(x > 0, x, y),
        lambda: x.cumsum(0).tanh(), lambda: x.flip(1) * 0.5, lambda: x / (1 + y.abs()),
    ]  # fmt: skip
    steps.live.append(steps.rng.choice(ops)().tanh())


# -- functions of the user's -----------------------------------------------------------------------


def function(steps: Steps) -> None:
    rng, x = steps.rng, steps.any()
    kind = rng.choice(list(_FUNCTIONS))
    w = steps.new() if rng.random() < 0.7 else rng.choice(steps.leaves)
    if rng.random() < 0.15:
        w = randn(*steps.shape, seed=9)
    apply = _FUNCTIONS[kind](steps, w).apply
    way = rng.randrange(4)
    if way == 0:
        y = checkpoint(lambda x: apply(x * 2), x, use_reentrant=False)
    elif way == 1:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with hooks:
            y = apply(x)
    elif way == 2 and rng.random() < 0.5:
        with torch.no_grad():
            y = apply(x)
    else:
        y = apply(x)
    y = y[0] if isinstance(y, tuple) else y
    steps.live.append(y.tanh())


def _bias(steps: Steps, w: Any) -> Any:
    return make(lambda ctx, x: x + w, lambda ctx, g: g.clamp(-1, 1))


def _straight(steps: Steps, w: Any) -> Any:
    return make(lambda ctx, x: (x * w).round(), lambda ctx, g: g * w)


def _saving(steps: Steps, w: Any) -> Any:
    def forward(ctx: Any, x: Any) -> Any:
        y, kept = (x * w).exp().clamp(max=3), w.cos()
        ctx.save_for_backward(x, y, kept, w)
        ctx.number = w.sum().item()
        return y

    def backward(ctx: Any, g: Any) -> Any:
        x, y, kept, w = ctx.saved_tensors
        return (g * y + kept * x).tanh() * ctx.number + w

    return make(forward, backward)


def _by_hand(steps: Steps, w: Any) -> Any:
    def body(x: Any) -> Any:
        return (x * w).sin() + w.mean(0)

    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return body(x)

    def backward(ctx: Any, g: Any) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = body(x)
        if w.requires_grad and w.is_leaf:
            y.backward(g)
            return x.grad
        return torch.autograd.grad(y, x, g)[0]

    return make(forward, backward)


def _several(steps: Steps, w: Any) -> Any:
    def forward(ctx: Any, x: Any) -> Any:
        order = (x * w).argmax(0)
        ctx.mark_non_differentiable(order)
        return x * w, order, x.sum() + w.sum()

    return make(forward, lambda ctx, g, _, total: (g * w).sign() + total)


def _memory(steps: Steps, w: Any) -> Any:
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() * 2)

    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(g.numpy() * x.detach().numpy()) + w

    return make(forward, backward)


def _keeping(steps: Steps, w: Any) -> Any:
    seen = steps.new(steps.shape[1])

    def forward(ctx: Any, x: Any) -> Any:
        seen.mul_(0.5).add_(x.mean(0))
        return x - seen

    steps.found.append(seen)
    return make(forward, lambda ctx, g: g * seen.sign())


def _inner(steps: Steps, w: Any) -> Any:
    inner = _bias(steps, w)

    def forward(ctx: Any, x: Any) -> Any:
        return inner.apply(x) * w

    def backward(ctx: Any, g: Any) -> Any:
        with torch.enable_grad():
            z = g.detach().requires_grad_()
            y = inner.apply(z) * w
        return torch.autograd.grad(y.sum(), z)[0]

    return make(forward, backward)


def _unused(steps: Steps, w: Any) -> Any:
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * w, x * 3

    def backward(ctx: Any, a: Any, b: Any) -> Any:
        return (1.0 if a is None else (a * w).sign()) + (1.0 if b is None else b.sign() + w)

    return make(forward, backward)


_FUNCTIONS = {
    "bias": _bias, "straight": _straight, "saving": _saving, "by hand": _by_hand,
    "several": _several, "memory": _memory, "keeping": _keeping, "inner": _inner, "unused": _unused,
}  # fmt: skip


# -- writes through views --------------------------------------------------------------------------


def write(steps: Steps) -> None:
    rng, (rows, columns) = steps.rng, steps.shape
    mode = rng.choice([nullcontext, nullcontext, torch.no_grad, torch.inference_mode])
    inside, i, j = rng.random() < 0.5, rng.randrange(rows), rng.randrange(columns)
    base = steps.any()
    base = base * 1 if mode is nullcontext else base.detach().clone()
    with mode():
        if inside and mode is not nullcontext:
            base = base * 1
        views = [
            lambda x: x[i], lambda x: x[i:], lambda x: x[:, j], lambda x: x[:, j:], lambda x: x.t(),
            lambda x: x.view(-1)[j:], lambda x: x.chunk(2, 1)[0], lambda x: x.narrow(0, i, 1),
            lambda x: x.select(1, j), lambda x: x.diagonal(), lambda x: x.unsqueeze(0)[..., :1],
            lambda x: x.unbind(1)[j], lambda x: x.t()[j:], lambda x: x.view(columns, rows)[j],
        ]  # fmt: skip
        writes = [
            lambda v: v.zero_(), lambda v: v.add_(1), lambda v: v.mul_(2), lambda v: v.fill_(0.5),
            lambda v: v.copy_(v.detach().sin()), lambda v: v.clamp_(-0.3, 0.3), lambda v: v.neg_(),
            lambda v: v.masked_fill_(v.detach() > 0, 0.1), lambda v: v.sub_(v.detach().mean()),
            lambda v: nn.init.constant_(v, 0.2), lambda v: v.__setitem__(..., 1.5),
        ]  # fmt: skip
        rng.choice(writes)(rng.choice(views)(base))
        second = rng.choice(views)(base)
        steps.found.append(second.detach().clone())
    if base.is_inference():
        steps.found.append(base.clone())
    else:
        steps.live.append(base.tanh())


# -- errors of values ------------------------------------------------------------------------------


def caught(steps: Steps) -> None:
    """An op that one row makes raise, on whichever rank it lies, or none does."""
    rng, (rows, columns) = steps.rng, steps.shape
    bad, at = rng.random() < 0.6, rng.randrange(4)
    eye = torch.eye(3).double().repeat(4, 1, 1)
    index = torch.arange(4) % rows
    index[at] = rows + 5 if bad else 0
    if bad:
        eye[at] = 0
    chance = torch.full((4,), 0.0)
    chance[at] = 2.0 if bad else 1.0
    count = torch.ones(4, dtype=torch.long)
    count[at] = 0 if bad else 2
    lay = lambda x: steps.at(x, rng.choice([S(0), B]))  # noqa: E731
    x = steps.any().detach()
    table, values = steps.new(), steps.new(4, columns)
    ops: list[Callable[[], Any]] = [
        lambda: torch.linalg.inv(lay(eye)), lambda: torch.linalg.cholesky(lay(eye)),
        lambda: torch.linalg.solve(lay(eye), lay(torch.ones(4, 3).double())),
        lambda: F.embedding(lay(index), table), lambda: table[lay(index)],
        lambda: table.index_select(0, lay(index)), lambda: torch.take(table, lay(index * columns)),
        lambda: table.clone().index_add(0, lay(index), values),
        lambda: F.cross_entropy(values, lay(index % 1 if not bad else index)),
        lambda: torch.bernoulli(lay(chance)), lambda: 7 // lay(count),
        lambda: lay(count) % lay(count),
        lambda: F.binary_cross_entropy(lay(chance), lay(torch.ones(4))),
        lambda: torch.gather(values, 0, lay(index[:, None] * (1 if bad else 0))),
    ]  # fmt: skip
    try:
        steps.found.append(rng.choice(ops)().double().sum().item())
    except (RuntimeError, IndexError, ZeroDivisionError, ValueError):
        steps.found.append("raised")
    steps.found.append(x.sum().item())


# -- models, stages and batches --------------------------------------------------------------------


def training(rng: random.Random, at: Laid) -> Any:
    """A model that holds functions of the user's, under a plan."""
    block, plan, entry = rng.choice(BLOCKS), rng.choice(PLANS), rng.choice([S(0), B, S(1)])
    rows, clips = rng.randint(2, 7), rng.random() < 0.5
    make_optimizer = rng.choice([torch.optim.SGD, torch.optim.AdamW])
    net = model(block)
    if at.placement is not None:
        flat = Placement("cpu", sorted(at.placement.ranks.ravel().tolist()))
        at = Laid(flat)
        net = consistent.parallelize(net, flat, plan)
    optimizer, found = make_optimizer(net.parameters(), lr=0.01), []
    for step in range(2):
        optimizer.zero_grad()
        value = loss(net(at(randn(rows, 4, seed=step), entry)), at(randn(rows, 4, seed=9), entry))
        value.backward()
        if clips:
            found.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
        optimizer.step()
        found.append(value.item())
    return found, list(net.parameters())


def stages(rng: random.Random, at: Laid) -> Any:
    """A model with tied weights or without, in stages."""
    options = {"tied": rng.random() < 0.7, "skips": rng.random() < 0.3}
    schedule = rng.choice(["gpipe", "1f1b"])
    norm, penalty = rng.choice([0.05, 10.0]), rng.random() < 0.5
    net, found = GPT(**options), []
    ids, target = batch(rng.randrange(9), 8)
    run: Any = None
    if at.placement is not None:
        each = [Placement("cpu", [r]) for r in sorted(at.placement.ranks.ravel().tolist())]
        run = pipeline(net, each, loss=loss_of, micro_batches=4, schedule=schedule)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        if run is None:
            value = loss_of(net(ids), target)
            value.backward()
        else:
            value = run.step(ids, target)
        found += [value.item(), float(nn.utils.clip_grad_norm_(net.parameters(), norm))]
        optimizer.step()
    if penalty:
        found.append(sum(float(p.detach().square().sum()) for p in net.parameters()))
    return found, sum(p.numel() for p in net.parameters())


def batches(rng: random.Random, at: Laid) -> Any:
    """Dicts with texts and numbers beside tensors."""
    count, size = rng.randint(5, 12), rng.randint(2, 5)
    items = [
        {"x": randn(3, seed=i), "name": f"item {i}", "number": i, "more": (f"t{i}", float(i))}
        for i in range(count)
    ]
    loader: Any = torch.utils.data.DataLoader(items, batch_size=size)  # type: ignore[arg-type]
    if at.placement is not None:
        flat = Placement("cpu", sorted(at.placement.ranks.ravel().tolist()))
        loader = consistent.data.loader(loader, flat)
    found = []
    for each in loader:
        pairs = list(zip(each["name"], each["number"].tolist(), strict=True))
        found.append([pairs, list(each["more"][0]), each["more"][1], each["x"].sum().item()])
    return found


def _steps(*statements: Callable[[Steps], None]) -> Callable[[random.Random, Laid], Any]:
    return lambda rng, at: Steps(rng, at).run(statements, rng.randint(2, 6))


KINDS: dict[str, Callable[[random.Random, Laid], Any]] = {
    "functions": _steps(compute, function, function),
    "writes": _steps(compute, write, write),
    "caught": _steps(compute, caught),
    "mixed": _steps(compute, function, write, caught),
    "mixed without errors": _steps(compute, function, write),
    "training": training,
    "stages": stages,
    "batches": batches,
}
