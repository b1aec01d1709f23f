"""Split the launched ranks into islands, each of which runs the library like a separate job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import TypeVar

import torch
from torch.utils.data import Dataset, Subset

from mirrored.transports.torch_dist.islands import IslandPosition, enter, enter_as_island

from .meetings import Meetings
from .outer import Outer

T = TypeVar("T")


class Islands:
    """The islands of a job, as seen from one rank; ``join`` returns this object.

    An island is a group of ranks that trains by itself, and seldom exchanges parameters with the
    other groups.

    Attributes:
        number: index of this rank's island, counted from 0.
        count: number of islands.
    """

    def __init__(self, between: IslandPosition, patience: float | None) -> None:
        self.number, self.count, self._between = between.number, between.count, between
        self._patience, self._outer_count = patience, 0

    def part(self, data: Dataset[T]) -> Subset[T]:
        """Return the subset of ``data`` that this island trains on: every ``count``-th item.

        The subset starts at item ``number``. All subsets have the same length, so up to ``count`` -
        1 items at the end are dropped.

        Raises:
            TypeError: the data set has no length.
        """
        if not isinstance(data, Sized):
            raise TypeError(
                f"islands.part: {type(data).__name__} has no length, so it cannot be cut. Let each "
                "island read another part of the stream: islands.number of islands.count."
            )
        # The end is a multiple of ``count``, so that all islands get the same number of items.
        return Subset(data, range(self.number, len(data) // self.count * self.count, self.count))

    def outer(
        self,
        model: torch.nn.Module,
        optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer],
        *,
        every: int,
        parts: int = 1,
        dtype: torch.dtype | None = None,
    ) -> Outer:
        """Return an object that averages the parameters of ``model`` between islands.

        Call its ``step()`` after each step of the training; it counts these steps, and exchanges
        parameters every ``every`` steps. All islands must make this call at the same point of the
        program. It first copies the parameters of island 0 to every island.

        ```
        outer = islands.outer(
            model, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True), every=64
        )
        ```

        Args:
            model: its parameters are global tensors of the island, or plain tensors.
            optimizer: a function that builds the outer optimizer from a list of parameters. The
                gradient of a parameter is the mean over islands of how far they moved it since the
                last exchange, so SGD with lr=1 averages the parameters.
            every: number of steps between two exchanges of the same parameter.
            parts: number of parts into which the parameters are divided. Each part is exchanged at
                its own step, once in ``every`` steps. The total number of bytes is unchanged, but
                they are sent one part at a time.
            dtype: dtype in which values are sent; by default each parameter's own dtype.
                torch.bfloat16 sends half the bytes of float32. torch.int8 sends a quarter, and
                torch.float8_e4m3fn too: one byte for each value, and a float32 scale for each 256.
                A complex number is sent as two real ones.

        Raises:
            ValueError: an argument is invalid, or the islands passed different parameters, layouts
                or arguments. All islands raise.
        """
        # A number for each call, so that a second model does not meet the first one's keys.
        self._outer_count += 1
        meetings = Meetings(self._between, self._patience, f"outer {self._outer_count}")
        return Outer(meetings, model, optimizer, every, parts, dtype)

    def __repr__(self) -> str:
        return f"Islands(number={self.number}, count={self.count})"


def join(
    count: int,
    *,
    number: int | None = None,
    endpoint: str | None = None,
    patience: float | None = None,
    timeout: float = 1800.0,
) -> Islands:
    """Split the launched ranks into ``count`` islands, and make this rank's island its world.

    An island has consecutive ranks. ``Placement.all``, plans, loaders and checkpoints see only the
    ranks of the island, numbered from 0. Only ``Islands.outer`` sends anything to other islands.

    ```
    islands = consistent.islands.join(2)                  # before any other call
    placement = Placement.all("cpu")                      # the ranks of this island
    model = consistent.parallelize(GPT(), placement, "zero3")
    optimizer = torch.optim.AdamW(model.parameters())
    outer = islands.outer(model, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9), every=64)
    for x, y in consistent.data.loader(islands.part(data), placement, batch_size=32):
        ...
        optimizer.step()
        outer.step()
    ```

    With ``number`` and ``endpoint``, all launched ranks form one island, and each island is
    launched separately. A launcher that kills its ranks when one of them dies then does not kill
    other islands.

    Args:
        count: number of islands. It divides the number of launched ranks.
        number: index of this island, from 0, if each island is launched separately.
        endpoint: "HOST:PORT" of a TCPStore that all islands can reach, if each island is launched
            separately, such as the store of a launcher that outlives the islands.
        patience: seconds that a meeting waits for missing islands before it is held without them. A
            late island misses that outer step; a lost island misses all later ones. None: every
            meeting needs all islands, and all raise if one is missing.
        timeout: seconds that a rank waits for other ranks, of its island or of another island.

    Raises:
        RuntimeError: torch.distributed is initialised already.
        ValueError: the ranks cannot be split into ``count`` islands, or only one of ``number`` and
            ``endpoint`` is given.
    """
    if (number is None) != (endpoint is None):
        raise ValueError(
            f"islands.join: number={number} and endpoint={endpoint!r}. An island that is launched "
            "by itself needs both; without them the launched ranks are cut."
        )
    if number is None or endpoint is None:
        return Islands(enter(count, timeout), patience)
    if not 0 <= number < count:
        raise ValueError(f"islands.join({count}): number={number}. Give one of 0 to {count - 1}.")
    return Islands(enter_as_island(number, count, endpoint, timeout), patience)
