"""Names of tensors and modules: patterns, the nearest right name, and names of repeated blocks."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def match(name: str, patterns: Iterable[str]) -> str | None:
    """The first of ``patterns`` that matches all of ``name``; ``name`` itself comes before."""
    if isinstance(patterns, Mapping) and name in patterns:
        return name
    for pattern in patterns:
        if (pattern == name or is_pattern(pattern)) and fnmatch.fnmatchcase(name, pattern):
            return pattern
    return None


def match_path(name: str, patterns: Mapping[str, Any]) -> str | None:
    """``match`` where ``*`` stops at a dot: ``layers.*`` is not a part of a layer."""
    if name in patterns:
        return name
    return next((p for p in patterns if is_pattern(p) and path_matches(name, p)), None)


def path_matches(name: str, pattern: str) -> bool:
    """Whether each part of ``name`` between dots matches its part of ``pattern``."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(wanted) == len(parts) and all(map(fnmatch.fnmatchcase, parts, wanted))


def is_pattern(text: str) -> bool:
    """Whether ``text`` has wildcards."""
    return "*" in text or "?" in text or "[" in text


def grouped(entries: Mapping[str, Any]) -> list[tuple[str, list[str], Any]]:
    """(text, names, value): entries of repeated blocks, whose names differ in numbers only and
    whose values are equal, in the order first met. The text has ``{0-11}`` for the numbers."""
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
    """``entries`` with one pattern for those of repeated blocks, where it matches no others.

    ``tied``: further names -> names in ``entries``. ``matches(name, pattern)``.
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
