"""Match names of tensors and modules with patterns, and group the names of repeated blocks."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole number between dots


def match(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first of ``patterns`` that matches all of ``name``; None if there is none.

    Patterns are those of ``fnmatch``: ``*.weight`` matches ``fc.weight``. If ``patterns`` is a
    mapping, ``name`` itself as a key precedes all patterns.
    """
    if isinstance(patterns, Mapping) and name in patterns:
        return name
    for pattern in patterns:
        if (pattern == name or is_pattern(pattern)) and fnmatch.fnmatchcase(name, pattern):
            return pattern
    return None


def match_path(name: str, patterns: Mapping[str, Any]) -> str | None:
    """Return the key that matches ``name``, where ``*`` does not match a dot; None if none does.

    Thus ``layers.*`` matches ``layers.0``, but not ``layers.0.mlp``.
    """
    if name in patterns:
        return name
    return next((p for p in patterns if is_pattern(p) and path_matches(name, p)), None)


def path_matches(name: str, pattern: str) -> bool:
    """Return whether ``pattern`` matches ``name`` part by part, where a dot separates parts.

    ``layers.*.mlp`` matches ``layers.0.mlp``, and ``layers.*`` does not.
    """
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(pattern_parts) == len(parts) and all(map(fnmatch.fnmatchcase, parts, pattern_parts))


def is_pattern(text: str) -> bool:
    """Return whether ``text`` has a wildcard of ``fnmatch``: ``*``, ``?`` or ``[``."""
    return "*" in text or "?" in text or "[" in text


def group_by_block(entries: Mapping[str, Any]) -> list[tuple[str, list[str], Any]]:
    """Group the entries of repeated blocks, and return (text, names, value) of each group.

    Names in a group differ only in their numbers, and have equal values: ``h.0.w`` and ``h.1.w``
    become ``("h.{0-1}.w", ["h.0.w", "h.1.w"], value)``. Groups are in the order of their first
    entries.
    """
    groups: dict[tuple, list[str]] = {}
    for name, value in entries.items():
        groups.setdefault((_NUMBER.sub("{}", name), value), []).append(name)
    return [(_group_text(shape, names), names, value) for (shape, value), names in groups.items()]


def _group_text(shape: str, names: Sequence[str]) -> str:
    """Return the text of a group: ``"h.{}.w", ["h.0.w", "h.1.w"] -> "h.{0-1}.w"``."""
    numbers = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    return shape.format(*(_ranges_text(sorted(set(each))) for each in numbers))


def _ranges_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: ``[0, 1, 2, 5] -> "{0-2,5}"``, ``[3] -> "3"``."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return "{" + ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in runs) + "}"


def as_patterns(
    entries: Mapping[str, Any],
    tied: Mapping[str, str] | None = None,
    matches: Callable[[str, str], bool] = fnmatch.fnmatchcase,
) -> dict[str, Any]:
    """Return ``entries`` with one pattern for the names of repeated blocks, for a short file.

    ``h.0.w`` and ``h.1.w`` with equal values become ``h.*.w``, unless it would match other names,
    too.

    Args:
        entries: name -> value.
        tied: further name of a tensor -> its name in ``entries``.
        matches: (name, pattern) -> whether the pattern matches.
    """
    patterns: dict[str, Any] = {}
    owner = {**{name: name for name in entries}, **(tied or {})}
    for _, names, value in group_by_block(entries):
        pattern, group = _NUMBER.sub("*", names[0]), set(names)
        matched_names = {own for name, own in owner.items() if matches(name, pattern)}
        if len(names) > 1 and matched_names == group:
            patterns[pattern] = value
        else:
            patterns.update(dict.fromkeys(names, value))
    return patterns
