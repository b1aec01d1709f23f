"""A plan as YAML, to be read and edited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .layouts import NAMES, Border, Layouts, Nd, nd_text
from .names import as_patterns, path_matches

KEYS = ("axes", "tensors", "modules", "notes")


def to_text(
    axes: tuple[str, ...],
    tensors: Mapping[str, Layouts],
    modules: Mapping[str, Border],
    notes: list[str],
    tied: Mapping[str, str],
) -> str:
    """YAML text; blocks that repeat are one pattern."""
    found: dict[str, Any] = {"axes": list(axes)}
    found["tensors"] = {k: _of_layouts(v) for k, v in as_patterns(tensors, tied).items()}
    found["modules"] = {
        k: _of_border(v) for k, v in as_patterns(modules, matches=path_matches).items()
    }
    found["notes"] = notes
    head = "# What consistent.parallelize does with each tensor and at each module's border.\n"
    kept = {key: value for key, value in found.items() if value or key == "tensors"}
    return head + _yaml().safe_dump(kept, sort_keys=False, width=100)


def from_text(text: str, where: str) -> dict[str, Any]:
    """The four entries of a plan, read from YAML.

    Raises:
        ValueError: it is no YAML, or not that of a plan.
    """
    yaml = _yaml()
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"plan: {where} is not YAML: {error}") from None
    if not isinstance(found, dict) or "tensors" not in found or set(found) - set(KEYS):
        raise ValueError(
            f"plan: {where} is not a plan: it must have `tensors:`, and may have `axes:`, "
            "`modules:` and `notes:`. plan.save(path) writes such a file."
        )
    return {key: found.get(key) or ([] if key in ("axes", "notes") else {}) for key in KEYS}


def _of_layouts(layouts: Layouts) -> Any:
    if layouts.is_plain:
        return nd_text(layouts.sbp)
    return {
        name: nd_text(nd)
        for name in NAMES
        if (nd := getattr(layouts, name)) != layouts.sbp or name == "sbp"
    }


def _of_border(border: Border) -> dict[str, Any]:
    sides = {"inputs": _ways(border.inputs), "outputs": _ways(border.outputs)}
    return {side: ways for side, ways in sides.items() if ways}


def _ways(ways: Mapping[int | str, Nd]) -> dict[int | str, str]:
    return {key: nd_text(nd) for key, nd in ways.items()}


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise ImportError(
            "plan: files of plans are YAML, and PyYAML is not installed: pip install pyyaml"
        ) from None
    return yaml
