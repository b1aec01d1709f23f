"""What a call does beside giving a result: it writes into tensors, or draws random numbers.

```
h = stage 0's          moved to stage 1, as it is when stage 0 ends
h.add_(1)              in stage 0: stage 1 would get what it was not given       raises here
h.add_(1)              in stage 1's copy: right there, and stage 0 has the old   raises where
                       values                                                    they are read
```

Writes are seen by torch's own count of them, which a tensor shares with its views. Under inference
mode torch counts none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..dispatch.plans.shards import HookOff
from ..spec.nested import tensors_in
from .program import Move


def version(x: torch.Tensor) -> int:
    """How often ``x``, or what it shares memory with, was written to."""
    with HookOff():
        return -1 if x.is_inference() else x._version


def versions(given: Any) -> list[int]:
    """The version of each tensor among the arguments."""
    return [version(x) for x in tensors_in(given)]


def writes_by_name(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function says that it writes into its first argument, or into ``out``."""
    if name == "requires_grad_":
        return False
    ends = name.endswith("_") and not name.endswith("__")
    return ends or name in ("__setitem__", "__set__") or "out" in kwargs


@dataclass(slots=True)
class _Copy:
    """What a stage has of a value that was made elsewhere."""

    source: int
    stage: int
    x: torch.Tensor
    version: int


class Writes:
    """Finds writes that one stage does and another would not see."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._sent: list[tuple[torch.Tensor, int, Move]] = []
        self._copies: list[_Copy] = []
        self._written: dict[int, tuple[int, str]] = {}  # value -> by which stage in a copy, where

    def sent(self, x: torch.Tensor, move: Move) -> None:
        """``x`` goes to another stage."""
        self._sent.append((x, version(x), move))

    def copied(self, source: int, stage: int, x: torch.Tensor) -> None:
        """``x`` is what ``stage`` has of the value ``source``."""
        self._copies.append(_Copy(source, stage, x, version(x)))

    def look(self, name: str, where: str) -> None:
        """After a call: raise if it wrote into what another stage was given before.

        Raises:
            RuntimeError: it did.
        """
        for x, before, move in self._sent:
            if version(x) != before:
                raise RuntimeError(
                    f"{self._program}: {name} at {where} writes into a tensor that stage "
                    f"{move.dst} was given before, at {move.where}.\n"
                    "  A stage hands on what it has made when it ends.\n  Write into a copy."
                )
        for copy in self._copies:
            if (now := version(copy.x)) != copy.version:
                copy.version = now
                self._written[copy.source] = copy.stage, f"{name} at {where}"

    def check_read(self, value: int, stage: int | None, name: str, where: str) -> None:
        """Raise if ``stage`` does not have what another one wrote into its copy of ``value``.

        Raises:
            RuntimeError: so it is.
        """
        if value not in self._written:
            return
        writer, what = self._written[value]
        if writer != stage:
            raise RuntimeError(
                f"{self._program}: {name} at {where} uses a tensor into which stage {writer} has "
                f"written, in {what}.\n  That stage wrote into its own copy.\n"
                "  Let it write into a new tensor (inplace=False), and use what it returns."
            )


class RefusingDraws(TorchDispatchMode):
    """Inside, drawing random numbers raises: a line on plain tensors is run by every stage that
    needs it, or followed once with its values."""

    def __init__(self, program: str, name: str, where: str) -> None:
        super().__init__()
        self._text = (
            f"{program}: {name} at {where} draws random numbers between the modules of stages.\n"
            "  What lies there is recorded once, and each stage would draw numbers of its own.\n"
            "  Draw it inside a stage's module, or pass it as an argument."
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(
            func, args, kwargs or {}
        ):
            raise RuntimeError(self._text)
        return func(*args, **(kwargs or {}))


def _without_dropout(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether it is attention that drops nothing."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[at] if at < len(args) else kwargs.get("dropout_p", argument.default_value)
            return not given
    return False
