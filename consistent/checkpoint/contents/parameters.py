"""Optimizer state by names of parameters instead of numbers, so that their order does not matter.

torch's state dict of an optimizer numbers the parameters. Saved state has their names, and is
converted back for the optimizer that loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Names = dict[int, list[str]]  # id of a parameter -> its names


def names_in(objects: Mapping[str, Any]) -> Names:
    """Return the names of each parameter of the modules in ``objects``, by the parameter's id.

    Each name occurs in two forms, without and with the module's key in ``objects``:
    ``["fc.weight", "model.fc.weight"]``. If there are several modules, the second form is first.
    """
    modules = {k: m for k, m in objects.items() if isinstance(m, torch.nn.Module)}
    names: Names = {}
    for key, module in modules.items():
        for name, p in module.named_parameters(remove_duplicate=False):
            both = [name, f"{key}.{name}"]
            names.setdefault(id(p), []).extend(both if len(modules) == 1 else both[::-1])
    return names


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the optimizer's parameters in the order in which its state dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _make_name_lookup(what: str, optimizer: Any, names: Names) -> Callable[[int, Any], list[str]]:
    """Return a function that maps (k, k-th parameter of the optimizer) to the parameter's names.

    They are those in ``names``, else the optimizer's own ``param_names``, else the number ``k`` if
    no module was given. ``what`` names the optimizer in errors.
    """
    own_names = [n for group in optimizer.param_groups for n in group.get("param_names", ())]
    count = len(parameters_of(optimizer))

    def name_of(k: int, p: Any) -> list[str]:
        if id(p) in names:
            return names[id(p)]
        if len(own_names) == count:
            return [own_names[k]]
        if not names:
            return [str(k)]
        raise ValueError(
            f"{what}: its parameter {k} of shape {tuple(p.shape)} is in none of the modules that "
            "are given, so it has no name. Give all modules whose parameters it steps, such as "
            "model=model."
        )

    return name_of


def all_names(what: str, optimizer: torch.optim.Optimizer, names: Names) -> list[list[str]]:
    """Return the list of names of each parameter, in the order of ``parameters_of(optimizer)``.

    ``names`` is the result of ``names_in``; ``what`` names the optimizer in errors.
    """
    name_of = _make_name_lookup(what, optimizer, names)
    return [name_of(k, p) for k, p in enumerate(parameters_of(optimizer))]


def named_state(what: str, optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """Return the optimizer's state dict with each parameter's number replaced by its first name.

    ``names`` is the result of ``names_in``; ``what`` names the optimizer in errors.
    """
    state_dict = optimizer.state_dict()
    first_names = [each[0] for each in all_names(what, optimizer, names)]
    groups = []
    for group in state_dict["param_groups"]:
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({**settings, "params": [first_names[k] for k in group["params"]]})
    state = {first_names[k] if isinstance(k, int) else k: v for k, v in state_dict["state"].items()}
    rest = {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")}
    return {**rest, "state": state, "param_groups": groups}


def numbered_state(
    what: str, saved: dict[str, Any], optimizer: torch.optim.Optimizer, names: Names
) -> dict[str, Any]:
    """Return the ``saved`` state dict in the form that ``optimizer.load_state_dict`` takes.

    It is the inverse of ``named_state``: each name becomes the parameter's number in ``optimizer``.
    A parameter may have been saved under any of its ``names``. ``what`` names the optimizer in
    errors.

    Raises:
        ValueError: the saved state is of other parameters, or groups them differently.
    """
    number_by_name = {
        name: k for k, each in enumerate(all_names(what, optimizer, names)) for name in each
    }
    groups = [{**g, "params": list(map(str, g["params"]))} for g in saved["param_groups"]]
    if all(n.isdigit() and n not in number_by_name for group in groups for n in group["params"]):
        # torch's own state dict has numbers.
        number_by_name = {str(k): k for k in number_by_name.values()}
    missing = [n for group in groups for n in group["params"] if n not in number_by_name]
    stored_numbers = {
        number_by_name[n] for group in groups for n in group["params"] if n in number_by_name
    }
    first_names = {k: name for name, k in reversed(number_by_name.items())}
    absent = [first_names[k] for k in sorted(set(first_names) - stored_numbers)]
    if missing or absent:
        raise ValueError(
            f"{what}: the checkpoint is of other parameters."
            + (f"\n    Only in the checkpoint: {', '.join(missing)}." if missing else "")
            + (f"\n    Only in the optimizer: {', '.join(absent)}." if absent else "")
            + "\n    Make the optimizer of the same parameters, and give their module too."
        )
    matched_groups = _match_groups(what, groups, optimizer, number_by_name)
    state = {number_by_name.get(str(name), name): value for name, value in saved["state"].items()}
    rest = {k: v for k, v in saved.items() if k not in ("state", "param_groups")}
    return {**rest, "state": state, "param_groups": matched_groups}


def _match_groups(
    what: str, saved: list[dict[str, Any]], optimizer: Any, number_by_name: dict[str, int]
) -> list[dict[str, Any]]:
    """Return the ``saved`` parameter groups in the order of the optimizer's groups.

    A saved group belongs to the optimizer's group with the same parameters; ``number_by_name`` has
    the number of each parameter by name. Raises ValueError if a group of the optimizer has none.
    """
    by_members = {frozenset(number_by_name[n] for n in group["params"]): group for group in saved}
    matched, start = [], 0
    for k, group in enumerate(optimizer.param_groups):
        numbers = list(range(start, start + len(group["params"])))
        start += len(numbers)
        match = by_members.get(frozenset(numbers))
        if match is None:
            raise ValueError(
                f"{what}: no group of parameters in the checkpoint is the optimizer's group {k}; "
                f"the checkpoint has groups of {[len(g['params']) for g in saved]} parameters, the "
                f"optimizer of {[len(g['params']) for g in optimizer.param_groups]}. Make the "
                "optimizer with the same groups."
            )
        settings = {key: v for key, v in match.items() if key != "params"}
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        matched.append({**settings, **names, "params": numbers})
    return matched
