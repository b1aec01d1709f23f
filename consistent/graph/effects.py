"""Side effects of calls while a program of stages is recorded: in-place writes, and random draws.

Stages are parts of a model on ranks of their own (pipeline stages).

```
h = output of stage 0      moved to stage 1, with the values it has when stage 0 ends
h.add_(1)                  in stage 0, after the move: stage 1 would get values     raises here
                           that the program did not send
h.add_(1)                  in stage 1, into its copy: correct there, and            raises where
                           stage 0 keeps the old values                             they are read
```

Writes are found by torch's version counter, which a tensor shares with its views. Inference tensors
have none, so in-place writes to them are not found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..dispatch.plans.shards import HookOff
from ..spec.nested import tensors_in
from .program import StageTransfer


def version(x: torch.Tensor) -> int:
    """Return torch's version counter of ``x``, which each in-place write increases.

    A tensor shares it with its views. -1 for an inference tensor, which has none.
    """
    with HookOff():  # read the attributes of torch.Tensor, past the hook of global tensors
        return -1 if x.is_inference() else x._version


def versions(given: Any) -> list[int]:
    """Return the version counter of each tensor among a call's arguments ``given``.

    Taken before and after the call, they tell whether it wrote in place.
    """
    return [version(x) for x in tensors_in(given)]


def writes_by_name(name: str, kwargs: dict[str, Any]) -> bool:
    """Return whether a call modifies its first argument or ``out``, judged by its name.

    ``add_`` and ``__setitem__`` do, ``add`` does not, unless ``out=`` is among ``kwargs``.
    """
    if name == "requires_grad_":
        return False
    ends_in_underscore = name.endswith("_") and not name.endswith("__")
    return ends_in_underscore or name in ("__setitem__", "__set__") or "out" in kwargs


@dataclass(slots=True)
class _StageCopy:
    """Copy of a value on the ranks of a stage that did not make it.

    Args:
        source: number of the value in the program.
        stage: the stage that has the copy.
        x: the copy.
        version: torch's version counter of ``x`` at the last check, to find writes.
    """

    source: int
    stage: int
    x: torch.Tensor
    version: int


class WriteChecker:
    """Detector of in-place writes by one stage that another stage would not see.

    The recorder of a program calls ``note_transfer`` and ``note_copy`` for each tensor that a stage
    sends or receives, ``check_writes`` after each recorded call, and ``check_read`` before a call
    reads a value. ``program`` is the program's name in error messages.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._sent_tensors: list[tuple[torch.Tensor, int, StageTransfer]] = []
        self._copies: list[_StageCopy] = []
        # Value -> (stage that has written into its copy of the value, call and source line).
        self._written_copies: dict[int, tuple[int, str]] = {}

    def note_transfer(self, x: torch.Tensor, move: StageTransfer) -> None:
        """Note that ``x`` is moved to another stage, so that later in-place writes to it raise."""
        self._sent_tensors.append((x, version(x), move))

    def note_copy(self, source: int, stage: int, x: torch.Tensor) -> None:
        """Note that ``stage`` has the copy ``x`` of the value number ``source``."""
        self._copies.append(_StageCopy(source, stage, x, version(x)))

    def check_writes(self, name: str, where: str) -> None:
        """Check which of the noted tensors the call that has just run wrote into.

        A write into a stage's own copy is remembered for ``check_read``.

        Args:
            name: the name of the call.
            where: its source line.

        Raises:
            RuntimeError: the call wrote into a tensor that was sent to another stage before.
        """
        for x, before, move in self._sent_tensors:
            if version(x) != before:
                raise RuntimeError(
                    f"{self._program}: {name} at {where} writes into a tensor that stage "
                    f"{move.dst} was given before, at {move.where}.\n"
                    "  A stage hands on what it has made when it ends.\n  Write into a copy."
                )
        for copy in self._copies:
            if (now := version(copy.x)) != copy.version:
                copy.version = now
                self._written_copies[copy.source] = copy.stage, f"{name} at {where}"

    def check_read(self, value: int, stage: int | None, name: str, where: str) -> None:
        """Raise if a call reads a value of which another stage has changed its own copy.

        Args:
            value: number of the value.
            stage: the stage that reads it.
            name: the name of the call that reads it.
            where: its source line.

        Raises:
            RuntimeError: another stage has written into its copy.
        """
        if value not in self._written_copies:
            return
        writer, what = self._written_copies[value]
        if writer != stage:
            raise RuntimeError(
                f"{self._program}: {name} at {where} uses a tensor into which stage {writer} has "
                f"written, in {what}.\n  That stage wrote into its own copy.\n"
                "  Let it write into a new tensor (inplace=False), and use what it returns."
            )


class RefusingDraws(TorchDispatchMode):
    """Dispatch mode that raises if random numbers are drawn between the modules of stages.

    Calls on plain tensors there are run by every stage that needs the result, or once while the
    step is recorded, so stages would not draw the same numbers.

    Args:
        program: the name of the program, for the error.
        name, where: the call that runs in this mode, and its source line.
    """

    def __init__(self, program: str, name: str, where: str) -> None:
        super().__init__()
        self._error_text = (
            f"{program}: {name} at {where} draws random numbers between the modules of stages.\n"
            "  What lies there is recorded once, and each stage would draw numbers of its own.\n"
            "  Draw it inside a stage's module, or pass it as an argument."
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _has_no_dropout(
            func, args, kwargs or {}
        ):
            raise RuntimeError(self._error_text)
        return func(*args, **(kwargs or {}))


def _has_no_dropout(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether this call of ``func`` has ``dropout_p=0``: attention then draws nothing."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            # The tag says that the op may draw; without dropout it does not.
            dropout_p = (
                args[at] if at < len(args) else kwargs.get("dropout_p", argument.default_value)
            )
            return not dropout_p
    return False
