"""Search for the places to cut runs that ranks have sorted, so that each rank gets its own piece.

```
rank 0   1 4 5   cut at 3:   1 | 4 5        1 item for rank 0, 2 for rank 1
rank 1   2 3 6               2 3 | 6        2                  1
```

A border lies between the pieces of two ranks in the sorted result. For each border, the cut of each
rank is inside a window, which is its whole run at first. All ranks share a few samples of their
windows. Samples that are known to be before or after the border narrow the windows until they are
empty. Two or three messages are enough for millions of items.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mirrored.transports.default import current

from ...whole_numbers import has_values

# A rank gives at most SAMPLES * (number of ranks) samples of a window. Each round of samples
# narrows a window to a few hundredths of its size.
SAMPLES = 64

_Window = tuple[tuple[int, int], ...]  # for each rank, the (first, last) possible cut


@dataclass(frozen=True)
class Cuts:
    """Finds how many items of its sorted run each rank must send to each rank.

    Called with the sorted keys and the logical indices of the items, which are in order where keys
    are equal. Returns the counts as [senders, receivers], the same on every rank.

    Args:
        sizes: sizes of the pieces of all ranks.
        me: index of this rank among them.
        ranks: all of them.
    """

    sizes: tuple[int, ...]
    me: int
    ranks: tuple[int, ...]

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        key, place = xs
        borders = [sum(self.sizes[:k]) for k in range(1, len(self.sizes))]
        windows: list[_Window] = [tuple((0, size) for size in self.sizes)] * len(borders)
        while any(map(_is_open, windows)):
            samples = self._gather_samples(key, place, windows)
            if not has_values(key):  # a simulation spreads each rank's items evenly
                return [torch.tensor([_even_counts(size, len(self.sizes)) for size in self.sizes])]
            windows = [
                _narrow_window(window, *samples[window], border)
                for window, border in zip(windows, borders, strict=True)
            ]
        cuts = [[0] * len(self.sizes), *([low for low, _ in w] for w in windows), [*self.sizes]]
        counts = [[b - a for a, b in itertools.pairwise(each)] for each in zip(*cuts, strict=True)]
        return [torch.tensor(counts)]

    def _gather_samples(
        self, key: Tensor, place: Tensor, windows: Sequence[_Window]
    ) -> dict[_Window, tuple[list[list[int]], Tensor]]:
        """All-gather samples of the items in ``windows``, the possible cuts in each rank's run.

        Returns, for each window, (spots of each rank: indices in its run; the samples (key, index)
        at these spots on all ranks).
        """
        max_count, unique_windows = SAMPLES * len(self.ranks), list(dict.fromkeys(windows))
        spots = {
            window: [_sample_indices(*each, max_count) for each in window]
            for window in unique_windows
        }
        own_spots = [spot for window in unique_windows for spot in spots[window][self.me]]
        own_indices = torch.tensor(own_spots, device=key.device, dtype=torch.int64)
        shapes = [
            (sum(len(spots[w][k]) for w in unique_windows), 2) for k in range(len(self.ranks))
        ]
        own_samples = torch.stack([key[own_indices].long(), place[own_indices]], 1)
        all_samples = [x.cpu() for x in current().all_gather(own_samples, shapes, self.ranks)]
        parts = [
            x.split([len(spots[window][k]) for window in unique_windows])
            for k, x in enumerate(all_samples)
        ]
        return {
            w: (spots[w], torch.cat([p[i] for p in parts])) for i, w in enumerate(unique_windows)
        }


def _is_open(window: _Window) -> bool:
    """Return whether the cut is not yet known on some rank."""
    return any(low < high for low, high in window)


def _sample_indices(low: int, high: int, max_count: int) -> list[int]:
    """Return at most ``max_count`` evenly spaced indices in [low, high), starting with ``low``."""
    count = min(high - low, max_count)
    return [low + j * (high - low) // count for j in range(count)]


def _even_counts(size: int, parts: int) -> list[int]:
    return [(k + 1) * size // parts - k * size // parts for k in range(parts)]


def _narrow_window(
    window: _Window, spots: list[list[int]], samples: Tensor, border: int
) -> _Window:
    """Return ``window`` narrowed by ``samples`` (key, index), which are at ``spots`` of the runs.

    All ranks together have ``border`` items before their cuts. If a sample is before the border, no
    rank has more items before the sample than before its cut; otherwise no rank has fewer. So the
    sample is before the border if and only if the ranks' numbers of items before the sample, each
    clamped to the rank's window, sum up to less than ``border``. For the sample's own rank the
    number is its spot; for other ranks the samples around it give bounds.
    """
    if not _is_open(window):
        return window
    key, place = samples.unbind(1)
    order = place.argsort()
    order = order[key[order].argsort(stable=True)]
    owner = torch.tensor([k for k, each in enumerate(spots) for _ in each])[order]
    spot = torch.tensor([s for each in spots for s in each])[order]
    is_own = owner == torch.arange(len(window))[:, None]
    low, high = (torch.tensor(each)[:, None] for each in zip(*window, strict=True))
    lower_bound = torch.where(is_own, spot + 1, low).cummax(1).values.sum(0) - 1
    upper_bound = torch.where(is_own, spot, high).flip(1).cummin(1).values.flip(1).sum(0)
    lows = torch.where(is_own & (upper_bound < border), spot + 1, low).amax(1)
    highs = torch.where(is_own & (lower_bound >= border), spot, high).amin(1)
    return tuple(zip(lows.tolist(), highs.tolist(), strict=True))
