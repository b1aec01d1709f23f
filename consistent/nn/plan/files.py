"""Convert plans and strategies to YAML, for people to read and edit, and back."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from . import yaml_text
from .layouts import CODED, NAMES, Border, Layouts, Nd, codecs_text, nd_text
from .names import as_patterns, path_matches

KEYS = ("axes", "tensors", "modules", "notes")
_KEEP = "keep_bytes"
# Entries of a strategy besides its plan (auto/strategies/strategy.py) -> their types.
STRATEGY = {
    "device_type": str,
    "stages": int,
    "data": int,
    "tensor": int,
    "micro_batches": int,
    "split": list,
    "checkpoint": list,
}


def to_text(
    axes: tuple[str, ...],
    tensors: Mapping[str, Layouts],
    modules: Mapping[str, Border],
    notes: list[str],
    *,
    tied: Mapping[str, str],
    keep_bytes: int | None,
) -> str:
    """Return a plan as YAML text, with one pattern for the tensors of repeated blocks.

    Args:
        axes: the names of the placement's axes.
        tensors: name or pattern -> layouts.
        modules: name or pattern -> border.
        notes: the notes of the plan.
        tied: further name of a tensor -> its name in ``tensors``.
        keep_bytes: the plan's limit on kept parameters; None if it is the default value.
    """
    found: dict[str, Any] = {"axes": list(axes)}
    found["tensors"] = {k: _of_layouts(v) for k, v in as_patterns(tensors, tied).items()}
    found["modules"] = {
        k: _of_border(v) for k, v in as_patterns(modules, matches=path_matches).items()
    }
    found["notes"] = notes
    head = "# What consistent.parallelize does with each tensor and at each module's border.\n"
    kept = {key: value for key, value in found.items() if value or key == "tensors"}
    kept |= {} if keep_bytes is None else {_KEEP: keep_bytes}
    return head + yaml_text.dumped(kept, width=100)


def from_text(text: str, where: str) -> dict[str, Any]:
    """Return the entries of a plan, read from YAML.

    Args:
        text: the YAML text.
        where: the name of the file, for errors.

    Raises:
        ValueError: the text is not YAML, is not a plan, or is a strategy with stages or
            micro-batches, which a plan cannot express.
    """
    found = _loaded(text, where)
    strategy = found.get("strategy") or {}
    if strategy and (strategy["stages"] > 1 or strategy["micro_batches"] > 1):
        raise ValueError(
            f"plan: {where} is a strategy of {strategy['stages']} stages and "
            f"{strategy['micro_batches']} micro-batches, of which a plan knows nothing. "
            "Apply all of it: consistent.auto.Strategy.load(path).apply(model, loss)."
        )
    return _plan_in(found)


def strategy_of(text: str, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the entries of a strategy, the entries of its plan), read from YAML.

    Args:
        text: the YAML text.
        where: the name of the file, for errors.

    Raises:
        ValueError: the text is not YAML, or not a strategy.
    """
    found = _loaded(text, where)
    strategy = found.get("strategy")
    if not strategy:
        raise ValueError(
            f"strategy: {where} is a plan and no strategy: it has no `strategy:`. Give it to "
            "parallelize: Plan.load(path)."
        )
    return strategy, _plan_in(found)


def strategy_text(strategy: Mapping[str, Any]) -> str:
    """Return the YAML text of a strategy's own entries, which follow the plan in its file."""
    return yaml_text.dumped({"strategy": dict(strategy)}, width=100)


def _plan_in(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return those entries of a YAML file that are arguments of ``Plan``."""
    said = {key: found.get(key) or ([] if key in ("axes", "notes") else {}) for key in KEYS}
    return said | ({_KEEP: found[_KEEP]} if _KEEP in found else {})


def _loaded(text: str, where: str) -> dict[str, Any]:
    """Return the entries of a plan's or strategy's YAML file, checked.

    Raises:
        ValueError: it is not YAML, or has other entries than a plan has.
    """
    found = yaml_text.loaded(text, "plan", where)
    allowed = {*KEYS, _KEEP, "strategy"}
    if not isinstance(found, dict) or "tensors" not in found or set(found) - allowed:
        raise ValueError(
            f"plan: {where} is not a plan: it must have `tensors:`, and may have `axes:`, "
            "`modules:`, `notes:` and `keep_bytes:`. plan.save(path) writes such a file."
        )
    if type(keeps := found.get(_KEEP, 0)) is not int or keeps < 0:
        raise ValueError(
            f"plan: {where}: keep_bytes is {short(keeps)}, and it is a number of bytes, 0 or more. "
            "Without it a plan has the usual one."
        )
    _check_strategy(found.get("strategy"), where)
    return found


def _check_strategy(found: Any, where: str) -> None:
    """Raise if the entry ``strategy:`` of a file has not all its keys, with values of their types.

    Raises:
        ValueError: the message names the key.
    """
    if found is None:
        return
    if not isinstance(found, dict) or set(found) != set(STRATEGY):
        wrong = sorted(set(found or ()) ^ set(STRATEGY)) if isinstance(found, dict) else found
        raise ValueError(
            f"strategy: {where}: `strategy:` has the entries {', '.join(STRATEGY)}, and here "
            f"{short(wrong)} is missing or too much. strategy.save(path) writes such a file."
        )
    for key, kind in STRATEGY.items():
        value = found[key]
        if type(value) is not kind or (kind is int and value < 1):
            wanted = {int: "a number of 1 or more", str: "a word", list: "a list of names"}[kind]
            raise ValueError(f"strategy: {where}: {key} is {short(value)}, and it is {wanted}.")


def _of_layouts(layouts: Layouts) -> Any:
    """Return layouts as values for YAML: ``"S(0)"``, or ``{"sbp": "S(0)", "use": "B"}``."""
    if layouts.is_plain:
        return nd_text(layouts.sbp)
    laid = {
        name: nd_text(nd)
        for name in NAMES
        if (nd := getattr(layouts, name)) != layouts.sbp or name == "sbp"
    }
    return laid | {name: codecs_text(x) for name in CODED if (x := getattr(layouts, name))}


def _of_border(border: Border) -> dict[str, Any]:
    """Return a border as values for YAML: ``{"outputs": {0: "B"}}``."""
    sides = {"inputs": _ways(border.inputs), "outputs": _ways(border.outputs)}
    return {side: ways for side, ways in sides.items() if ways}


def _ways(ways: Mapping[int | str, Nd]) -> dict[int | str, str]:
    return {key: nd_text(nd) for key, nd in ways.items()}
