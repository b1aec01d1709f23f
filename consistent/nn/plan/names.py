"""Match names of tensors and modules with patterns, and group the names of repeated blocks."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole number between dots


def match(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first of ``patterns`` that matches all of ``name``; None if there is none.

    In a mapping, ``name`` itself as a key precedes all patterns.
    """
    if isinstance(patterns, Mapping) and name in patterns:
        return name
    for pattern in patterns:
        if (pattern == name or is_pattern(pattern)) and fnmatch.fnmatchcase(name, pattern):
            return pattern
    return None


def match_path(name: str, patterns: Mapping[str, Any]) -> str | None:
    """Return the key that matches ``name``, with ``*`` stopping at a dot; None if there is none.

    Thus ``layers.*`` matches a layer, but not a module inside a layer.
    """
    if name in patterns:
        return name
    return next((p for p in patterns if is_pattern(p) and path_matches(name, p)), None)


def path_matches(name: str, pattern: str) -> bool:
    """Return whether each part of ``name`` between dots matches its part of ``pattern``."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(wanted) == len(parts) and all(map(fnmatch.fnmatchcase, parts, wanted))


def is_pattern(text: str) -> bool:
    """Return whether ``text`` has wildcards."""
    return "*" in text or "?" in text or "[" in text


def grouped(entries: Mapping[str, Any]) -> list[tuple[str, list[str], Any]]:
    """Group the entries of repeated blocks, and return (text, names, value) of each group.

    The names in a group differ only in their numbers, and their values are equal. The text is the
    name with a range such as ``{0-11}`` for the numbers. Groups are in the order of first
    occurrence.
    """
    groups: dict[tuple, list[str]] = {}
    for name, value in entries.items():
        groups.setdefault((_NUMBER.sub("{}", name), value), []).append(name)
    return [(_text(shape, names), names, value) for (shape, value), names in groups.items()]


def _text(shape: str, names: Sequence[str]) -> str:
    numbers = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    return shape.format(*(_ranges(sorted(set(each))) for each in numbers))


def _ranges(numbers: Sequence[int]) -> str:
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
    """Return ``entries`` with one pattern for each group of repeated blocks, for a short file.

    A group keeps its names if the pattern would match other entries, too.

    Args:
        entries: name -> value.
        tied: further name of a tensor -> its name in ``entries``.
        matches: (name, pattern) -> whether the pattern matches.
    """
    found: dict[str, Any] = {}
    owner = {**{name: name for name in entries}, **(tied or {})}
    for _, names, value in grouped(entries):
        pattern, group = _NUMBER.sub("*", names[0]), set(names)
        meant = {own for name, own in owner.items() if matches(name, pattern)}
        if len(names) > 1 and meant == group:
            found[pattern] = value
        else:
            found.update(dict.fromkeys(names, value))
    return found
