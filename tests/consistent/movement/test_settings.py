"""What one rank alone sets, and that changes what it computes, is named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import consistent
from consistent import B, Placement, S
from consistent.movement.settings import first_difference
from tests.ranks import pool


@contextlib.contextmanager
def _set(setter: Callable[[Any], None], value: Any, before: Any) -> Any:
    setter(value)
    try:
        yield
    finally:
        setter(before)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "float32 matmul precision": lambda: _set(
        torch.set_float32_matmul_precision, "medium", "highest"
    ),
    "deterministic algorithms": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "number of threads": lambda: _set(torch.set_num_threads, 2, 1),
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast on the CPU": lambda: torch.autocast("cpu", torch.bfloat16),
}
MODULES: dict[str, Callable[[nn.Module], Any]] = {
    "evaluating": lambda module: module.eval(),
    "p=0.5": lambda module: setattr(module[1], "p", 0.5),
    "eps=0.1": lambda module: setattr(module[2], "eps", 0.1),
}
HYPERPARAMETERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "lr": lambda group: group.update(lr=0.5),
    "weight_decay": lambda group: group.update(weight_decay=0.1),
    "betas": lambda group: group.update(betas=(0.8, 0.9)),
    "amsgrad": lambda group: group.update(amsgrad=True),
}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.LayerNorm(4))


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def each_alone(rank: int) -> dict[str, list[str]]:
    """What ranks are told where rank 1 alone sets a thing: of a plan, and in check mode."""
    placement = Placement("cpu", [0, 1])
    found: dict[str, list[str]] = {}
    for name, changed in SETTINGS.items():
        made = model()
        with changed() if rank == 1 else contextlib.nullcontext():
            told = said_by(lambda made=made: consistent.parallelize(made, placement, "data"))
        x = consistent.distribute(torch.ones(4), placement, S(0))
        with changed() if rank == 1 else contextlib.nullcontext(), consistent.check_mode():
            found[name] = [told, said_by(lambda x=x: x.to_global(sbp=B))]
    for name, change in MODULES.items():
        made = model()
        change(made) if rank == 1 else None
        told = said_by(lambda made=made: consistent.parallelize(made, placement, "data"))
        found[name] = [told]
    for name, change in HYPERPARAMETERS.items():
        made = consistent.parallelize(model(), placement, "data")
        made(torch.ones(2, 4)).sum().backward()
        optimizer = torch.optim.Adam(made.parameters())
        change(optimizer.param_groups[0]) if rank == 1 else None
        with consistent.check_mode():
            found[name] = [said_by(optimizer.step)]
    return found


@pytest.mark.filterwarnings("ignore:parallelize. the number of threads")
def test_every_rank_is_told_what_one_alone_has_set() -> None:
    one, other = pool(2).run(each_alone)
    assert one == other and len(one) == 14
    for name, texts in one.items():
        if name == "number of threads":
            assert texts.pop(0) == ""  # a warning
        for text in texts:
            assert name in text and "rank 1" in text, (name, text)


def alike(rank: int) -> float:
    placement = Placement("cpu", [0, 1])
    torch.set_num_threads(1)
    made = consistent.parallelize(model(), placement, "data")
    optimizer = torch.optim.SGD(made.parameters(), lr=torch.tensor(0.1))
    with consistent.check_mode():
        made(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return sum(float(x.sum().item()) for x in made.parameters())


def test_what_is_alike_passes() -> None:
    one, other = pool(2).run(alike)
    assert one == other


def test_notes_of_many_ranks_are_read_once_for_each_setting() -> None:
    class Note(dict[str, str]):
        asked = 0

        def get(self, name: str, default: Any = None) -> Any:
            Note.asked += 1
            return super().get(name, default)

    notes = [Note(first="a", second="b") for _ in range(100)]
    assert first_difference(notes) is None
    assert Note.asked == 2 * len(notes)
    notes[99]["second"] = "c"
    assert first_difference(notes) == "second"
