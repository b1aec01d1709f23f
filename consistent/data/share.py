"""The items of a batch that one rank reads (``Share``).

```
a batch of 7 items, placement (2, 2), sbp (S(0), B)      sbp (S(0), S(0))
  ranks 0 and 1   items 0 1 2 3                          rank 0   0 1      rank 2   4 5
  ranks 2 and 3   items 4 5 6                            rank 1   2 3      rank 3   6
```

This is plain arithmetic: worker processes use it, and nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import NdSbp, Placement, Split, piece


@dataclass(frozen=True)
class Share:
    """The part of every batch that one rank reads.

    ``cuts`` has (number of parts, index of this part) for each axis that splits dim 0, outer axis
    first. Rank 3 of a (2, 2) placement with ``(S(0), S(0))`` has ``((2, 1), (2, 1))``. Without
    cuts it is the whole batch.
    """

    cuts: tuple[tuple[int, int], ...] = ()

    @classmethod
    def for_coordinate(cls, coordinate: tuple[int, ...], placement: Placement, sbp: NdSbp) -> Share:
        """Return the share of the rank at ``coordinate`` in the layout (``placement``, ``sbp``)."""
        return cls(
            tuple(
                (parts, index)
                for entry, parts, index in zip(sbp, placement.shape, coordinate, strict=True)
                if isinstance(entry, Split) and entry.dim == 0 and parts > 1
            )
        )

    def start_and_size(self, count: int) -> tuple[int, int]:
        """Return (start, size) of this share of a batch of ``count`` items."""
        start = 0
        for parts, index in self.cuts:
            first, count = piece(count, parts, index)
            start += first
        return start, count

    @property
    def index(self) -> int:
        """Return the number of this share, which is equal on ranks that read the same items."""
        number = 0
        for parts, index in self.cuts:
            number = number * parts + index
        return number

    def select(self, items: list) -> tuple[list, int]:
        """Return (the items of a batch that this rank reads, how many of them are its part).

        If its part is empty, the result is (first item, 0): the rank reads one item all the same,
        to know the dtypes and shapes of the tensors.
        """
        start, size = self.start_and_size(len(items))
        return (items[start : start + size] if size else items[:1]), size
