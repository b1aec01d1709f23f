"""Read and write YAML files that people edit: plans, strategies, machines."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from mirrored import whole_files

_MAX_BYTES = 4 << 20
_MAX_LEVELS = 50


def write(path: str | Path, text: str) -> Path:
    """Write ``text`` to ``path`` atomically, and make missing folders."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    whole_files.write(target, text.encode())
    return target


def read(path: str | Path) -> str:
    """Return the text of a file of YAML.

    Raises:
        ValueError: the path is not a regular file of text, or is larger than any plan.
    """
    # Nonblocking: opening a pipe without a writer would wait forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise ValueError(
                f"{path} is not a file of YAML: it is a folder, a pipe or a device, or larger than "
                f"{_MAX_BYTES >> 20} MiB. Give the file that save(path) wrote."
            )
        try:
            return file.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not a file of YAML: it is not text ({error.reason}). Give the file "
                "that save(path) wrote."
            ) from None


def load(text: str, what: str, where: str) -> Any:
    """Return the value of a YAML text, which must not have aliases.

    A text of ten lines with aliases can expand to more than fits into memory.

    Args:
        text: the YAML text.
        what: the kind of file, for errors.
        where: the name of the file, for errors.

    Raises:
        ValueError: the text is not YAML, has an alias, or is nested deeper than any plan.
    """
    yaml = _import_yaml(what)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    levels = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            levels += isinstance(event, yaml.CollectionStartEvent)
            levels -= isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(
                    f"{what}: {where} refers to a part of itself by *{event.anchor[:40]}, which is "
                    "not read here. Write that part out where it is meant."
                )
            if levels > _MAX_LEVELS:
                raise ValueError(
                    f"{what}: {where} is nested deeper than {_MAX_LEVELS} levels, and no file of "
                    f"a {what} is. Give the one that save(path) wrote."
                )
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{what}: {where} is not YAML: {error}") from None


def dump(value: Any, **options: Any) -> str:
    """Return ``value`` as YAML text; ``options`` are those of PyYAML's ``safe_dump``."""
    return _import_yaml("plan").safe_dump(value, sort_keys=False, **options)


def _import_yaml(what: str) -> Any:
    """Return the module ``yaml``; ``what`` is the kind of file, for the error without PyYAML."""
    try:
        import yaml
    except ImportError:
        raise ImportError(
            f"{what}: files of {what}s are YAML, and PyYAML is not installed: pip install pyyaml"
        ) from None
    return yaml
