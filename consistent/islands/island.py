"""join: this rank's island, in which everything else runs as in a job of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import TypeVar

import torch
from torch.utils.data import Dataset, Subset

from mirrored.transports.torch_dist.islands import Between, enter, enter_whole

from .outer import Outer

T = TypeVar("T")


class Islands:
    """The islands of a job, as one rank sees them.

    Attributes:
        number: of this rank's island, counted from 0.
        count: how many islands there are.
    """

    def __init__(self, between: Between, patience: float | None) -> None:
        self.number, self.count, self._between = between.number, between.count, between
        self._patience = patience

    def part(self, data: Dataset[T]) -> Subset[T]:
        """The items of ``data`` that this island trains on: each ``count``-th, from ``number`` on.
        All islands get as many; up to ``count`` - 1 items at the end are left out.

        Raises:
            TypeError: the data set has no length.
        """
        if not isinstance(data, Sized):
            raise TypeError(
                f"islands.part: {type(data).__name__} has no length, so it cannot be cut. Let each "
                "island read another part of the stream: islands.number of islands.count."
            )
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
        """Start averaging: all islands get island 0's parameters, and ``outer.step()`` counts
        steps. A call of all islands at the same place of the program.

        ```
        outer = islands.outer(
            model, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True), every=64
        )
        ```

        Args:
            model: its parameters are global tensors of the island, or plain ones.
            optimizer: makes the outer optimizer of the parameters that it is given. Its gradient is
                the mean over islands of how far they have come: SGD with lr=1 averages parameters.
            every: after how many steps islands meet.
            parts: parameters are dealt out to so many parts, each of which meets at a step of its
                own, once in ``every`` steps: as many bytes, a part at a time.
            dtype: numbers are sent so; each in the parameter's own dtype by default. bfloat16 sends
                half the bytes of float32.

        Raises:
            ValueError: a figure has no meaning, or islands were given other parameters, layouts or
                figures; then on all islands.
        """
        return Outer(self._between, self._patience, model, optimizer, every, parts, dtype)

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
    """Cut the ranks that were launched into ``count`` islands of consecutive ranks, and make this
    rank's island its world: ``Placement.all``, plans, loaders and checkpoints see its ranks alone,
    numbered from 0. Nothing is sent to other islands but by ``Islands.outer``.

    ```
    islands = consistent.islands.join(2)                  # first of all
    placement = Placement.all("cpu")                      # the ranks of this island
    model = consistent.parallelize(GPT(), placement, "zero3")
    optimizer = torch.optim.AdamW(model.parameters())
    outer = islands.outer(model, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9), every=64)
    for x, y in consistent.data.loader(islands.part(data), placement, batch_size=32):
        ...
        optimizer.step()
        outer.step()
    ```

    With ``number`` and ``endpoint`` the launched ranks are one island, and each island is launched
    by itself: a launcher that ends its ranks when one dies then ends no other island.

    Args:
        count: of islands; the number of launched ranks is a multiple of it.
        number: of this island, from 0, if it is launched by itself.
        endpoint: "HOST:PORT" of a TCPStore that all islands reach, then, such as that of a launcher
            which outlives islands.
        patience: seconds for which a meeting waits for islands that do not come, and holds it
            without them. One that is late is left out of that outer step, and one that is lost of
            all. None: all islands meet, or all raise.
        timeout: seconds that a rank waits for others, of its island or of another one.

    Raises:
        RuntimeError: torch.distributed is initialised already.
        ValueError: the ranks cannot be cut so, or a number or an endpoint is given alone.
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
    return Islands(enter_whole(number, count, endpoint, timeout), patience)
