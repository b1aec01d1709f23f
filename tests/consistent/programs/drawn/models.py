"""Models under plans, stages and batches."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import nn

import consistent
from consistent import B, Placement, S
from consistent.nn import pipeline
from tests.consistent.pipeline.gpt import GPT, batch, loss_of
from tests.consistent.torch_patches.functions_of_users import BLOCKS, PLANS, loss, model
from tests.twins import Laid, randn


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


# What runs several stages on a placement needs as many parts.
SCHEDULES = {
    "gpipe": 1, "1f1b": 1, "one at a time": 1, "interleaved1f1b": 2, "loopedbfs": 2,
    "interleavedzerobubble": 2, "zbvzerobubble": 2, "dualpipev": 2,
}  # fmt: skip


def stages(rng: random.Random, at: Laid) -> Any:
    """A model with tied weights or without, in stages."""
    schedule = rng.choice(list(SCHEDULES))
    options: dict[str, Any] = {"tied": rng.random() < 0.7, "skips": rng.random() < 0.3}
    options["blocks"] = 4 if SCHEDULES[schedule] == 1 else 8
    norm, penalty = rng.choice([0.05, 10.0]), rng.random() < 0.5
    rows, micro = rng.choice([(8, 4), (9, 4), (13, 8), (16, 8)])
    net, found = GPT(**options), []
    seed, frozen = rng.randrange(9), rng.random() < 0.2
    if frozen:
        net.places.requires_grad_(False)
    run: Any = None
    if at.placement is not None:
        each = [Placement("cpu", [r]) for r in sorted(at.placement.ranks.ravel().tolist())]
        micro = max(micro, 2 * len(each)) if schedule == "dualpipev" else micro
        micro = len(each) * 2 if schedule.startswith("interleaved") else micro
        run = pipeline(net, each, loss=loss_of, micro_batches=micro, schedule=schedule)
    make_optimizer = rng.choice([torch.optim.SGD, torch.optim.AdamW])
    optimizer = make_optimizer((p for p in net.parameters() if p.requires_grad), lr=0.1)
    for step in range(2):
        ids, target = batch(seed + step, rows)
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
    return found, sum(p.numel() for p in net.parameters()), len(list(net.named_parameters()))


class Pair(NamedTuple):
    first: Any
    second: Any


def batches(rng: random.Random, at: Laid) -> Any:
    """Dicts with texts and numbers beside tensors, nested, the last one shorter."""
    count, size = rng.randint(5, 12), rng.randint(2, 5)
    kind = rng.choice(["dict", "tuple", "nested", "named", "texts", "own"])
    options: dict[str, Any] = {"batch_size": size, "drop_last": rng.random() < 0.3}
    if rng.random() < 0.3:
        options["shuffle"], options["generator"] = True, torch.Generator().manual_seed(3)
    if kind == "own":
        options["collate_fn"] = _own
    items = [_item(kind, i) for i in range(count)]
    loader: Any = torch.utils.data.DataLoader(items, **options)  # type: ignore[arg-type]
    if at.placement is not None:
        placement = at.placement
        if rng.random() < 0.5 or placement.ndim == 1:
            placement = Placement("cpu", sorted(placement.ranks.ravel().tolist()))
        loader = consistent.data.loader(loader, placement)
    return [_read(each) for _ in range(2) for each in loader]


def _item(kind: str, i: int) -> Any:
    x = randn(3, seed=i)
    if kind == "texts":
        return f"item {i}"
    if kind == "tuple":
        return x, f"item {i}", i
    if kind == "named":
        return Pair(x, {"text": f"t{i}", "deep": [float(i), (x.sum(), f"u{i}")]})
    if kind == "nested":
        return {"a": {"x": x, "names": [f"t{i}", f"u{i}"]}, "b": [i, {"c": x[:2] * i}]}
    return {"x": x, "name": f"item {i}", "number": i, "more": (f"t{i}", float(i))}


def _own(items: list[Any]) -> Any:
    """A collate function of the user's."""
    return {
        "x": torch.stack([item["x"] for item in items]),
        "names": [item["name"] for item in items],
        "count": len(items),
        "numbers": torch.tensor([item["number"] for item in items]),
    }


def _read(value: Any) -> Any:
    """What a program sees of a batch."""
    if isinstance(value, torch.Tensor):
        return value.sum().item(), value.tolist(), list(value.shape)
    if isinstance(value, dict):
        return {key: _read(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [_read(item) for item in value]
    return value
