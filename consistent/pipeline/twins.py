"""Give each stage its own object of a module that a model uses at several places.

The objects (twins) share their parameters, which ``tied.py`` ties across stages.

```
Sequential(a, b, a, c)    0: a   1: b | 2: a's twin   3: c       cut before 2
                          0: a   1: b   2: a        | 3: c       cut before 3
```
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from .cut import Cut
from .share import has_state


class _Place(NamedTuple):
    """Where a model uses a module again, which it has used before: ``parent._modules[key]``.

    Args:
        parent, key: the module that holds it, and the name there.
        name: the name in the model.
        module: the repeated module.
        twin_of: the module and its submodules -> their twins, shallow copies that stand there.
    """

    parent: nn.Module
    key: str
    name: str
    module: nn.Module
    twin_of: dict[nn.Module, nn.Module]


class Twins:
    """Twins of a model's repeated modules: a shallow copy at each use after the first.

    With them each use can be in another stage. Only modules with parameters or saved buffers get
    twins. Making an instance puts the twins into the model. ``keep_one_per_stage`` then removes
    those that the cut does not need; ``restore_modules`` removes all.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[_Place] = []
        self._insert_twins(model, "", set())

    def _insert_twins(self, module: nn.Module, name: str, seen: set[nn.Module]) -> None:
        """Put a twin at each use, below ``module``, of a module that was ``seen`` before.

        ``name`` is the name of ``module`` in the model.
        """
        seen.add(module)
        for key, child in module._modules.items():
            if child is None:
                continue
            path = f"{name}.{key}" if name else key
            if child not in seen:
                self._insert_twins(child, path, seen)
            elif has_state(child):
                place = _Place(module, key, path, child, {})
                module._modules[key] = _twin(child, place.twin_of)
                self._places.append(place)

    def restore_modules(self) -> None:
        """Put the repeated modules back in place of their twins, after an error."""
        for place in self._places:
            place.parent._modules[place.key] = place.module

    def keep_one_per_stage(self, cut: Cut) -> Cut:
        """Let each stage keep one object of each module that the model uses repeatedly.

        Before this call each use has an object of its own (a twin), also in ``cut``, the division
        of the model into stages. The other objects are replaced in the model by those that are
        kept. Returns ``cut`` with the objects that are kept.

        Raises:
            ValueError: a module that is used in several stages has persistent buffers.
        """
        stage_of = {
            module: stage
            for stage, units in enumerate(cut.stages)
            for unit in units
            for module in unit.module.modules()
        }
        # (repeated module, stage) -> module inside it -> the object that this stage keeps.
        kept_of: dict[tuple, dict[nn.Module, nn.Module]] = {}
        replacement_of: dict[nn.Module, nn.Module] = {}  # object -> the object of the same stage
        for place in self._places:
            _check_buffers(place, stage_of)
            for twin_of in ({m: m for m in place.twin_of}, place.twin_of):
                stages = {stage_of[x] for x in twin_of.values() if x in stage_of}
                if len(stages) == 1:
                    kept_modules = kept_of.setdefault((place.module, *stages), twin_of)
                    replacement_of |= {twin_of[m]: kept_modules[m] for m in twin_of}
            twin = place.twin_of[place.module]
            place.parent._modules[place.key] = replacement_of.get(twin, twin)
        units = [
            tuple(
                replace(unit, module=replacement_of.get(unit.module, unit.module)) for unit in stage
            )
            for stage in cut.stages
        ]
        return replace(cut, stages=tuple(units))


def _check_buffers(place: _Place, stage_of: dict[nn.Module, int]) -> None:
    """Raise if a module with persistent buffers is in another stage than its twin."""
    for module, twin in place.twin_of.items():
        stages = stage_of.get(module), stage_of.get(twin)
        persistent = set(module._buffers) - module._non_persistent_buffers_set
        if persistent and stages[0] != stages[1]:
            raise ValueError(
                f"pipeline: {place.name!r} is in stage {stages[1]} and is the same "
                f"{type(place.module).__name__} as one in stage {stages[0]}, and it has the "
                f"buffers {sorted(persistent)}.\n"
                "  What one stage writes into a buffer the other would not see.\n"
                "  Cut the model so that both places are in one stage, or put a module of its own "
                "at each, which may share the parameters."
            )


def _twin(module: nn.Module, twin_of: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a shallow copy of ``module`` with twins of its submodules.

    It has the same parameters, buffers and hooks, in dicts of its own; ``__init__`` is not run.
    ``twin_of`` collects {module: twin}.
    """
    if module not in twin_of:
        twin = twin_of[module] = object.__new__(type(module))  # without running __init__
        for name, value in vars(module).items():
            is_container = type(value) in (dict, OrderedDict, list, set)
            twin.__dict__[name] = copy.copy(value) if is_container else value
        twin._modules = {
            key: child if child is None else _twin(child, twin_of)
            for key, child in module._modules.items()
        }
    return twin_of[module]
