"""Convert plans and strategies to YAML, for people to read and edit, and back."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from . import yaml_text
from .layouts import CODEC_FIELDS, LAYOUT_FIELDS, Border, Layouts, Nd, codecs_text, nd_text
from .names import as_patterns, path_matches

KEYS = ("axes", "tensors", "modules", "notes")
_KEEP_BYTES = "keep_bytes"
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
    entries: dict[str, Any] = {"axes": list(axes)}
    entries["tensors"] = {k: _layouts_value(v) for k, v in as_patterns(tensors, tied).items()}
    entries["modules"] = {
        k: _border_value(v) for k, v in as_patterns(modules, matches=path_matches).items()
    }
    entries["notes"] = notes
    head = "# What consistent.parallelize does with each tensor and at each module's border.\n"
    yaml_entries = {key: value for key, value in entries.items() if value or key == "tensors"}
    yaml_entries |= {} if keep_bytes is None else {_KEEP_BYTES: keep_bytes}
    return head + yaml_text.dump(yaml_entries, width=100)


def from_text(text: str, where: str) -> dict[str, Any]:
    """Return the entries of a plan, read from YAML.

    Args:
        text: the YAML text.
        where: the name of the file, for errors.

    Raises:
        ValueError: the text is not YAML, is not a plan, or is a strategy with stages or
            micro-batches, which a plan cannot express.
    """
    entries = _read_entries(text, where)
    strategy = entries.get("strategy") or {}
    if strategy and (strategy["stages"] > 1 or strategy["micro_batches"] > 1):
        raise ValueError(
            f"plan: {where} is a strategy of {strategy['stages']} stages and "
            f"{strategy['micro_batches']} micro-batches, of which a plan knows nothing. "
            "Apply all of it: consistent.auto.Strategy.load(path).apply(model, loss)."
        )
    return _plan_arguments(entries)


def read_strategy(text: str, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the entries of a strategy, the entries of its plan), read from YAML.

    Args:
        text: the YAML text.
        where: the name of the file, for errors.

    Raises:
        ValueError: the text is not YAML, or not a strategy.
    """
    entries = _read_entries(text, where)
    strategy = entries.get("strategy")
    if not strategy:
        raise ValueError(
            f"strategy: {where} is a plan and no strategy: it has no `strategy:`. Give it to "
            "parallelize: Plan.load(path)."
        )
    return strategy, _plan_arguments(entries)


def strategy_text(strategy: Mapping[str, Any]) -> str:
    """Return the YAML text of a strategy's own entries, which follow the plan in its file."""
    return yaml_text.dump({"strategy": dict(strategy)}, width=100)


def _plan_arguments(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return those entries of a YAML file that are arguments of ``Plan``."""
    arguments = {key: entries.get(key) or ([] if key in ("axes", "notes") else {}) for key in KEYS}
    return arguments | ({_KEEP_BYTES: entries[_KEEP_BYTES]} if _KEEP_BYTES in entries else {})


def _read_entries(text: str, where: str) -> dict[str, Any]:
    """Return the entries of a plan's or strategy's YAML file, checked.

    Raises:
        ValueError: it is not YAML, or has other entries than a plan has.
    """
    entries = yaml_text.load(text, "plan", where)
    allowed = {*KEYS, _KEEP_BYTES, "strategy"}
    if not isinstance(entries, dict) or "tensors" not in entries or set(entries) - allowed:
        raise ValueError(
            f"plan: {where} is not a plan: it must have `tensors:`, and may have `axes:`, "
            "`modules:`, `notes:` and `keep_bytes:`. plan.save(path) writes such a file."
        )
    if type(keeps := entries.get(_KEEP_BYTES, 0)) is not int or keeps < 0:
        raise ValueError(
            f"plan: {where}: keep_bytes is {short(keeps)}, and it is a number of bytes, 0 or more. "
            "Without it a plan has the usual one."
        )
    _check_strategy(entries.get("strategy"), where)
    return entries


def _check_strategy(strategy: Any, where: str) -> None:
    """Raise if the entry ``strategy:`` of a file has not all its keys, with values of their types.

    Raises:
        ValueError: the message names the key.
    """
    if strategy is None:
        return
    if not isinstance(strategy, dict) or set(strategy) != set(STRATEGY):
        wrong = (
            sorted(set(strategy or ()) ^ set(STRATEGY)) if isinstance(strategy, dict) else strategy
        )
        raise ValueError(
            f"strategy: {where}: `strategy:` has the entries {', '.join(STRATEGY)}, and here "
            f"{short(wrong)} is missing or too much. strategy.save(path) writes such a file."
        )
    for key, kind in STRATEGY.items():
        value = strategy[key]
        if type(value) is not kind or (kind is int and value < 1):
            expected = {int: "a number of 1 or more", str: "a word", list: "a list of names"}[kind]
            raise ValueError(f"strategy: {where}: {key} is {short(value)}, and it is {expected}.")


def _layouts_value(layouts: Layouts) -> Any:
    """Return layouts as values for YAML: ``"S(0)"``, or ``{"sbp": "S(0)", "use": "B"}``."""
    if layouts.is_plain:
        return nd_text(layouts.sbp)
    texts = {
        name: nd_text(nd)
        for name in LAYOUT_FIELDS
        if (nd := getattr(layouts, name)) != layouts.sbp or name == "sbp"
    }
    return texts | {name: codecs_text(x) for name in CODEC_FIELDS if (x := getattr(layouts, name))}


def _border_value(border: Border) -> dict[str, Any]:
    """Return a border as values for YAML: ``{"outputs": {0: "B"}}``."""
    sides = {"inputs": _layout_texts(border.inputs), "outputs": _layout_texts(border.outputs)}
    return {side: texts for side, texts in sides.items() if texts}


def _layout_texts(layouts: Mapping[int | str, Nd]) -> dict[int | str, str]:
    return {key: nd_text(nd) for key, nd in layouts.items()}
