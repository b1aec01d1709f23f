"""Cut a module into pipeline stages, by module names or by balanced cost.

```
GPT                                  split=["blocks.2", "norm"]
  embed       stage 0                a stage begins at each name, in the order in which the parts
  blocks                             are defined
    0  1      stage 0
    2  3      stage 1
  norm  head  stage 2
```

Units (also called parts) are the largest modules that belong to a single stage. Ops that the
model's own forward runs between units belong to the stage of their operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from .balance import even_ends


@dataclass(frozen=True)
class Unit:
    """A named module that belongs as a whole to one stage."""

    name: str
    module: nn.Module

    @property
    def numel(self) -> int:
        """Return the number of elements of the unit's parameters."""
        return sum(p.numel() for p in self.module.parameters())


@dataclass(frozen=True)
class Cut:
    """Assignment of a model's modules to stages.

    Args:
        stages: the units of each stage.
        owners: name -> (module, stage) of the modules that contain units and have parameters of
            their own, in addition to those of the units.
    """

    stages: tuple[tuple[Unit, ...], ...]
    owners: dict[str, tuple[nn.Module, int]]


def cut_at_names(model: nn.Module, names: Sequence[str]) -> Cut:
    """Cut a model so that a new stage begins at each named module.

    ["blocks.2", "norm"] gives three stages. The names must be in the order in which the modules are
    defined.

    Raises:
        ValueError: a name is not a module of the model or names its first part, or the names are
            not in that order.
    """
    known = dict(model.named_modules())
    for name in names:
        if name not in known or not name:
            similar = [n for n in known if n.rpartition(".")[2] == name.rpartition(".")[2] and n]
            hint = similar or [n for n, _ in model.named_children()]
            raise ValueError(
                f"pipeline: split names {name!r}, which is not a module of "
                f"{type(model).__name__}.\n"
                f"  A stage begins at a module.\n  Its modules are {', '.join(hint[:8])}, ..."
            )
    # Only a module with a named module inside has to be divided.
    units = _units(model, lambda name, _: any(n.startswith(f"{name}.") for n in names))
    order = [unit.name for unit in units]
    starts = []
    for name in names:
        inside = [k for k, unit in enumerate(order) if unit == name or unit.startswith(f"{name}.")]
        starts.append(inside[0] if inside else -1)
    if starts != sorted(set(starts)) or (starts and starts[0] <= 0):
        raise ValueError(
            f"pipeline: split={list(names)}: stages would begin at parts {starts} of "
            f"{type(model).__name__}, whose parts are {', '.join(order)}.\n"
            "  Each stage has at least one part, and stages come in the order of the parts.\n"
            "  Name the first module of every stage but stage 0, in order."
        )
    ends = [*starts, len(units)]
    stages = tuple(tuple(units[a:b]) for a, b in zip([0, *starts], ends, strict=True))
    return Cut(stages, _owners(model, stages))


def cut_balanced(
    model: nn.Module, units: Sequence[Unit], count: int, cost: Callable[[Unit], float]
) -> Cut:
    """Cut ``units`` into ``count`` stages so that the most expensive stage is as cheap as possible.

    ``cost`` returns the cost of a unit: its seconds, or its number of parameters.

    Raises:
        ValueError: there are fewer units than stages.
    """
    if len(units) < count:
        raise ValueError(
            f"pipeline: {type(model).__name__} is to be cut into {count} stages, and it has "
            f"{len(units)} parts: {', '.join(u.name for u in units)}.\n"
            "  Each stage has at least one.\n  Give fewer placements, or a schedule with fewer "
            "stages on each."
        )
    ends = even_ends([cost(unit) for unit in units], count)
    stages = tuple(tuple(units[a:b]) for a, b in zip([0, *ends], ends, strict=False))
    return Cut(stages, _owners(model, stages))


def candidate_units(model: nn.Module, count: int) -> list[Unit]:
    """Return the units that a cut into ``count`` stages can choose from, in definition order.

    A module is divided into its children if it contains a list of modules, such as ``blocks``, and
    has more than ``1 / count`` of the parameters. Modules without such lists stay whole, since
    their children are often called in another order than they are defined in.
    """
    total = sum(p.numel() for p in model.parameters())

    def is_large(name: str, module: nn.Module) -> bool:
        lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
        has_list = any(isinstance(m, lists) and len(m) > 1 for m in module.modules())
        return has_list and sum(p.numel() for p in module.parameters()) > total / count

    return _units(model, is_large)


def _units(model: nn.Module, is_divided: Callable[[str, nn.Module], bool]) -> list[Unit]:
    """Return the largest modules of ``model`` for which ``is_divided(name, module)`` is False.

    Modules without children, which cannot be divided, are units too. Modules without a forward are
    always divided.
    """
    units: list[Unit] = []

    def visit(name: str, module: nn.Module) -> None:
        children = list(module.named_children())
        # A ModuleList or ModuleDict has no forward of its own, so it cannot be a unit.
        callable_ = type(module).forward is not nn.Module.forward
        if callable_ and (not children or not (name == "" or is_divided(name, module))):
            units.append(Unit(name, module))
            return
        for key, child in children:
            visit(f"{name}.{key}" if name else key, child)

    visit("", model)
    return units


def _owners(model: nn.Module, stages: Sequence[Sequence[Unit]]) -> dict[str, tuple[nn.Module, int]]:
    """Return {name: (module, stage)} of the modules outside the units that own parameters.

    The stage is that of the first unit inside the module.
    """
    stage_of = [(unit.name, stage) for stage, units in enumerate(stages) for unit in units]
    inside = {id(m) for units in stages for unit in units for m in unit.module.modules()}
    owners = {}
    for name, module in model.named_modules():
        if id(module) not in inside and module._parameters:
            prefix = f"{name}." if name else ""
            first = next((stage for unit, stage in stage_of if unit.startswith(prefix)), 0)
            owners[name] = module, first
    return owners
