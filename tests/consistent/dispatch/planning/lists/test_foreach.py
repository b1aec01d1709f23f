"""Every op of torch over lists of tensors gives what it gives on plain ones, whatever lies how.

The calls are made from torch's schemas. Each list argument is S, P, B, plain, and mixed, alone and
with the others; so is each factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from consistent import B, P, Placement, S, distribute
from consistent.dispatch.plans.shards import plain
from tests.ranks import ALL, pool
from tests.twins import GRIDS, Laid, compare, randn

LISTS = [name for name in dir(torch) if name.startswith("_foreach_")]
STEPS = [name for name in dir(torch) if name.startswith("_fused_") and name.endswith("_")]
SHAPES = [(4, 3), (5,), (2, 4), (1,)]
MATRICES = [(4, 3), (2, 5), (3, 3), (1, 2)]
PLAIN = "plain"
# How the tensors of one list lie, by position.
WAYS: dict[str, list[Any]] = {
    "B": [(B, B)],
    "S": [(S(0), B)],
    "S S": [(S(0), S(0)), (S(0), S(0)), (S(0), S(1))],
    "P": [(P, B)],
    "P P": [(P, P)],
    "mixed": [(S(0), B), (P, B), (B, S(0)), (B, P)],
    "plain": [PLAIN],
    "partly plain": [PLAIN, (S(0), B), (B, B)],
}


def overloads(name: str) -> Iterator[Any]:
    packet = getattr(torch.ops.aten, name)
    for each in packet.overloads():
        schema = getattr(packet, each)._schema
        if not any(argument.is_out for argument in schema.arguments):
            yield schema


def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """In (0.1, 0.9), where all these functions are smooth."""
    return randn(*shape, seed=seed).sigmoid() * 0.8 + 0.1


def shapes_of(name: str, argument: int) -> list[tuple[int, ...]]:
    if name == "_foreach_mm":
        return [shape[::-1] if argument else shape for shape in MATRICES]
    return SHAPES


def argument_of(at: Laid, schema: Any, index: int, way: str, factor: Any) -> Any:
    kind = str(schema.arguments[index].real_type)
    if kind == "List[Tensor]":
        layouts = WAYS[way]
        return [
            laid(at, numbers(shape, seed=10 * index + i), layouts[i % len(layouts)])
            for i, shape in enumerate(shapes_of(schema.name.removeprefix("aten::"), index))
        ]
    if kind == "Tensor":
        some = torch.tensor([0.5, 2.0, 1.5, 3.0]) if "addc" in schema.name else torch.tensor(0.5)
        return laid(at, some.double(), factor)
    return [0.5, 2.0, 1.5, 3.0] if kind == "List[number]" else 2.0


def laid(at: Laid, x: torch.Tensor, layout: Any) -> Any:
    if layout == PLAIN:
        return x.clone()
    first, second = (B if isinstance(e, type(S(0))) and e.dim >= x.ndim else e for e in layout)
    return at(x, first, second)


def ways_on(axes: int) -> list[str]:
    """The ways that differ from each other on so many axes."""
    found: dict[Any, str] = {}
    for way, layouts in WAYS.items():
        # As often as gives each of the four tensors its layout.
        four = [layouts[i % len(layouts)] for i in range(len(SHAPES))]
        found.setdefault(tuple(x if x == PLAIN else x[:axes] for x in four), way)
    return list(found.values())


def calls(at: Laid, name: str, axes: int) -> list[Any]:
    """What ``name`` gives and what it leaves in its arguments, of all its overloads."""
    found, known = [], ways_on(axes)
    for schema in overloads(name):
        given = [a for a in schema.arguments if not a.has_default_value() or a.name == "scalars"]
        lists = [i for i, a in enumerate(given) if str(a.real_type) == "List[Tensor]"]
        alike = [dict.fromkeys(lists, way) for way in known]
        # One list lies otherwise than the others, which are all B or all S, in turn.
        mixed = [
            {**dict.fromkeys(lists, others), i: way}
            for i in lists[1:]
            for k, way in enumerate(known)
            for others in ("B", "S")
            if ALL or others == "BS"[(i + k) % 2]
        ]
        factors: list[Any] = [PLAIN, (B, B), (P, B), *([(B, P)] if axes > 1 else [])]
        takes_one = any(str(a.real_type) == "Tensor" for a in given)
        for turn, way in enumerate([*alike, *mixed]):
            if at.placement is not None and set(way.values()) == {"plain"}:
                continue
            every = ALL or turn < len(alike)  # one factor in turn where lists lie unlike
            some = factors if every else [factors[(turn + turn // len(known)) % len(factors)]]
            for factor in some if takes_one else factors[:1]:
                args = [
                    argument_of(at, schema, i, way.get(i, "B"), factor) for i in range(len(given))
                ]
                out = getattr(torch, name)(*args)
                found.append((str(schema), way, factor, out, args[0]))
    return found


def check(rank: int, name: str, ranks: Any, make: Callable[..., Any]) -> None:
    compare(rank, make, ranks, name, 1 if len(ranks) == 3 else 2)


def plainly(at: Laid, name: str, axes: int) -> list[Any]:
    """Without the calls that hold no global tensor, in both runs."""
    return [each for each in calls(at, name, axes) if set(each[1].values()) != {"plain"}]


def differing(rank: int, names: list[str], ranks: Any) -> dict[str, str]:
    """What differs from plain torch, by the names of the ops."""
    found = {}
    for name in names:
        try:
            check(rank, name, ranks, plainly)
        except Exception as error:  # noqa: BLE001  (all of them are listed together)
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("world", [3, 4] if ALL else [3])
def test_every_list_op_in_every_layout(world: int) -> None:
    assert pool(world).run(differing, LISTS, GRIDS[world]) == [{}] * world


def devices(rank: int, names: list[str]) -> dict[str, set[str]]:
    """Devices of the results on this rank, of calls with lists of the first rank."""
    lists = [
        [distribute(numbers(s, k), Placement("cpu", [0]), B) for s in SQUARES] for k in (0, 1, 2)
    ]
    found: dict[str, set[str]] = {}
    for name in names:
        for given in ((lists[0],), lists[:2], (lists[0], 2.0), lists, (*lists[:2], 0.5)):
            try:
                with torch.no_grad():
                    made = getattr(torch, name)(*given)
            except (TypeError, RuntimeError):  # it takes other arguments
                continue
            found[name] = {plain(x).device.type for x in made}
            break
    return found


SQUARES = [(3, 3), (2, 2)]


def test_a_rank_outside_allocates_no_results() -> None:
    names = [name for name in LISTS if not name.endswith("_")]
    inside, outside = pool(2).run(devices, names)
    assert set(names) == set(inside) == set(outside)
    assert {name: {"meta"} for name in names} == outside
