"""A call of a module under zero3 passes through few files, and each calls only those below it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from graphlib import TopologicalSorter
from itertools import groupby
from types import FrameType
from typing import Any

import torch
from torch import nn

import consistent
from consistent import B, Placement
from consistent.nn import Plan
from tests.consistent.nn.sharded.test_gathered import ZERO3
from tests.consistent.nn.sharded.test_prefetch import cores_to_spare
from tests.mirrored.kinds import over_gloo
from tests.ranks import pool
from tests.test_floors import FILES, module_of

MODULES = {str(path): module_of(path) for path in FILES}
NN = "consistent.nn."
# Comprehensions are parts of their functions.
PARTS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


def calls(run: Callable[[], Any]) -> list[tuple[str, str, str]]:
    """(module of the library that calls, module and name of the function) of each call."""
    found: list[tuple[str, str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_filename not in MODULES or code.co_name in PARTS:
            return
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename not in MODULES:
            caller = caller.f_back
        above = "" if caller is None else MODULES[caller.f_code.co_filename]
        found.append((above, MODULES[code.co_filename], code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def visits(found: list[tuple[str, str, str]]) -> list[str]:
    """The files of ``nn/`` in the order in which they are called, one after another."""
    files = [file.removeprefix(NN).removeprefix("sharded.") for _, file, _ in found if NN in file]
    return [file for file, _ in groupby(files)]


def check(found: list[tuple[str, str, str]]) -> None:
    """Files of ``nn/`` do not call each other in circles, and box their parameters in one call."""
    below: dict[str, set[str]] = {}
    for above, file, _ in found:
        if NN in above and NN in file and above != file:
            below.setdefault(above, set()).add(file)
    TopologicalSorter(below).prepare()
    boxings = [file for above, file, name in found if NN in above and name == "rebox_several"]
    assert len(boxings) == 1


class Net(nn.Module):
    """Layers, of which ``watched`` is called by ``calls``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.watched = -1
        self.found: list[Any] = []

    def forward(self, x: Any) -> Any:
        for i, layer in enumerate(self.layers):
            if i == self.watched:
                out: list[Any] = []
                self.found = calls(lambda layer=layer, x=x, out=out: out.append(layer(x)))
                (x,) = out
            else:
                x = layer(x)
        return x


def trained(keep_bytes: int) -> tuple[Any, Any]:
    """A module whose order of gathers is known, and an input."""
    p = Placement("cpu", [0, 1])
    model = consistent.parallelize(Net(), p, Plan({"*": ZERO3}, keep_bytes=keep_bytes))
    x = consistent.distribute(torch.randn(4, 8), p, B).requires_grad_()
    for _ in range(3):
        model(x).sum().backward()
    return model, x


def one_layer(rank: int, watched: int) -> list[str]:
    model, x = trained(keep_bytes=0)
    model.watched = watched
    model(x).sum().backward()
    check(model.found)
    return visits(model.found)


def one_layer_with_cores(rank: int, watched: int) -> list[str]:
    with cores_to_spare():
        return one_layer(rank, watched)


def whole_model(rank: int) -> list[str]:
    model, x = trained(keep_bytes=1 << 20)
    found = calls(lambda: model(x))
    check(found)
    return visits(found)


FORWARD = ["module_calls", "gathered", "order", "saved", "gathered", "saved"]


def test_a_module_that_gathers_its_parameters() -> None:
    for found in pool(2).run(one_layer, 1):
        assert found == FORWARD


def test_a_module_that_prefetches_those_of_the_next_in_a_thread_or_by_messages() -> None:
    starts = [*FORWARD[:3], "prefetch", *FORWARD[3:]]
    for found in pool(2).run(one_layer_with_cores, 1):
        assert found == starts
    for found in pool(2).run(over_gloo, one_layer, 0):  # starts one message for both that follow
        assert found == starts
    for found in pool(2).run(over_gloo, one_layer, 1):
        assert found == FORWARD


def test_a_model_that_gathers_its_parameters_together() -> None:
    """Each layer finds its parameters gathered; nothing that autograd saves is replaced."""
    layers = ["module_calls", "gathered"] * 3
    for found in pool(2).run(whole_model):
        assert found == [*FORWARD[:4], *layers, "saved"]
