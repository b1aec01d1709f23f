"""Values of plain tensors that are known while a program of stages is recorded."""

from __future__ import annotations

from typing import Any

import torch

from ..spec.nested import map_instances, map_tensors, tensors_in


class StandInValues:
    """Values that stand-ins for plain tensors have, as they follow from sizes or integer inputs.

    A call whose tensors are all known runs on these values, so that a step may branch on them.
    Tensors are found by their ids; the recorder keeps stand-ins alive, and this table the values.
    """

    def __init__(self) -> None:
        self._values: dict[int, torch.Tensor] = {}  # id of a stand-in -> its values
        self._stand_ins: dict[int, Any] = {}  # id of values -> their stand-in
        self._by_inputs: set[int] = set()  # ids of stand-ins whose values follow from inputs
        # Ids of stand-ins whose values may have been overwritten.
        self._overwritten: set[int] = set()

    def put(self, stand_in: Any, x: torch.Tensor, by_inputs: bool) -> None:
        """Note ``x`` as the values of the stand-in ``stand_in``.

        ``by_inputs`` says that they follow from the step's inputs, and not only from sizes.
        """
        self._values[id(stand_in)] = x
        self._stand_ins[id(x)] = stand_in
        if by_inputs:
            self._by_inputs.add(id(stand_in))

    def get(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the values of the stand-in ``x``; None if they are not known."""
        return None if id(x) in self._overwritten else self._values.get(id(x))

    def noted_values(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the values that were noted for ``x``, even if a write may have changed them."""
        return self._values.get(id(x))

    def stand_in_of(self, x: torch.Tensor) -> Any:
        """Return the stand-in whose noted values are the tensor ``x``; ``x`` if there is none."""
        return self._stand_ins.get(id(x), x)

    def arguments(self, given: tuple) -> tuple | None:
        """Return a call's arguments with values in place of stand-ins; None if one is not known.

        With them the call is run, because its results may decide what the program does, as
        ``mask.all()``. A device ``meta`` becomes ``cpu``.
        """
        if any(self.get(x) is None for x in tensors_in(given)):
            return None
        values = map_tensors(given, lambda x: self._values[id(x)])
        meta, cpu = torch.device("meta"), torch.device("cpu")
        return map_instances(values, torch.device, lambda d: cpu if d == meta else d)

    def follow(self, given: tuple, writes: bool) -> bool:
        """Return whether the result of a call on ``given`` follows from the step's inputs.

        If such a call writes, all known values count as following from inputs from then on, since
        any of them may be a view of what was written.
        """
        follows = any(id(x) in self._by_inputs for x in tensors_in(given))
        if follows and writes:
            self._by_inputs |= set(self._values)
        return follows

    def forget(self) -> None:
        """Forget all values known so far, after a call without known values has written in place.

        Any of them may be a view of what it wrote.
        """
        self._overwritten |= set(self._values)
