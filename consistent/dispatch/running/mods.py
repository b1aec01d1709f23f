"""What ``flex_attention`` is told by functions: ``score_mod`` and ``mask_mod``.

They read tensors of their own, by closures, attributes or globals. A first call on numbers finds
these, on all ranks alike: of a global tensor each rank then has the whole, and a plain one counts
as B. So a gradient that they have is summed over the ranks, each of which has its places alone.
Where a mask is made of a ``mask_mod``, each rank makes the whole of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...spec import B, Placement
from ..plans.shards import adopt, compare, is_global, plain, rebox

_NAME = "flex_attention"
_getitem = torch.Tensor.__getitem__
_is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore
Places = tuple[Tensor, Tensor, Tensor, Tensor]


class Mods:
    """The functions of one call, as an argument that all calls have alike: plans do not depend on
    them. ``clear`` lets go of them, since a plan keeps the arguments that it was made with."""

    def __init__(self, score_mod: Callable | None, block_mask: Any, placement: Placement) -> None:
        self._score, self._block_mask = score_mod, block_mask
        self._mask = None if block_mask is None else block_mask.mask_mod
        self._placement = placement
        self._read = _Reads(placement)
        self._blocks: Tensor | None = None

    def __eq__(self, other: object) -> bool:
        return other.__class__ is Mods

    def __hash__(self) -> int:
        return hash(Mods)

    def __repr__(self) -> str:
        return "mods"

    def clear(self) -> None:
        """Forget the functions, and what they read."""
        self._score = self._mask = self._block_mask = self._blocks = None
        self._read = _Reads(self._placement)

    def find(self, device: torch.device, dtype: torch.dtype) -> None:
        """Find what the functions read. All ranks call this alike."""
        if self._block_mask is not None:
            for x in (self._block_mask.kv_num_blocks, self._block_mask.kv_indices):
                compare(x, self._placement, "the block mask of flex_attention")
        at = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
        score = torch.zeros((), dtype=dtype, device=device)
        self._read.made += [*at, score]
        with self._read:
            if self._score is not None:
                self._score(score, *at)
            if self._mask is not None:
                self._mask(*at)
        self._read.finds = False

    # -- for the form ------------------------------------------------------------------------------

    @property
    def learned(self) -> list[Tensor]:
        """What the functions read that has a gradient."""
        return [x for _, x in self._read.known.values() if x.requires_grad]

    @property
    def block_size(self) -> tuple[int, int]:
        """Rows and keys of a block."""
        return (1, 1) if self._block_mask is None else self._block_mask.BLOCK_SIZE

    def seen_blocks(self) -> Tensor | None:
        """Whether any row of a block sees any key of another, on the CPU; None without a mask."""
        mask = self._block_mask
        if mask is None or mask.kv_indices.shape[-1] == 1 == mask.kv_indices.shape[-2]:
            return None
        if self._blocks is None:
            self._blocks = mask.to_dense().flatten(0, -3).any(0).cpu()
        return self._blocks

    def scores(self, scores: Tensor, at: Places) -> Tensor:
        """The scores as ``score_mod`` changes them."""
        if self._score is None:
            return scores
        with self._read:
            return _over_places(self._score, (0,))(scores, *at)

    def sees(self, at: Places) -> Tensor | None:
        """Whether a row sees a key; None where all do."""
        if self._mask is None:
            return None
        with self._read:
            return _over_places(self._mask, ())(*at)


def _over_places(function: Callable, first: tuple[int, ...]) -> Callable:
    """``function`` of numbers, for all batches, heads, rows and keys."""
    for place in (3, 2, 1, 0):
        dims = [0 if i == place else None for i in range(4)]
        function = torch.vmap(function, in_dims=(*first, *dims))
    return function


class Wholes(TorchFunctionMode):
    """Inside, global tensors are the whole of them on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[Tensor, Tensor]] = {}  # by id: (the tensor, what stands for it)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        args = tuple(map(self._taken, args))
        kwargs = {key: self._taken(x) for key, x in (kwargs or {}).items()}
        if func is _getitem and _by_tensors(args[1]):
            # Under vmap Tensor.__getitem__ would ask for the number.
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return torch.ops.aten.index(args[0], index)
        return func(*args, **kwargs)

    def _taken(self, x: Any) -> Any:
        if isinstance(x, tuple | list):
            return type(x)(map(self._taken, x)) if type(x) in (tuple, list) else x
        if not isinstance(x, Tensor):
            return x
        known = self.known.get(id(x))
        if known is not None:
            return known[1]
        return self._enter(x) if self._is_read(x) else x

    def _is_read(self, x: Tensor) -> bool:
        return is_global(x)

    def _enter(self, x: Any) -> Tensor:
        self.known[id(x)] = x, plain(_whole(x))
        return self.known[id(x)][1]


class _Reads(Wholes):
    """Wholes that the functions of a call on ``placement`` read. While it ``finds``, it notes plain
    tensors that they read, too."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self._placement = placement
        self.finds = True
        self.made: list[Tensor] = []  # by the functions themselves, in the first call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        if self.finds:
            self.made += [x for x in _each(out) if isinstance(x, Tensor)]
        return out

    def _is_read(self, x: Tensor) -> bool:
        return is_global(x) or self.finds and not any(x is y for y in self.made)

    def _enter(self, x: Any) -> Tensor:
        if not self.finds:
            raise RuntimeError(
                f"{_NAME}: score_mod or mask_mod reads a global tensor, {x._spec}, that it did not "
                "read when it was called for place 0. Read all tensors in each call."
            )
        if _is_wrapped(x):
            return x
        if not is_global(x):
            compare(x, self._placement, _NAME)
            x_global = adopt(x, self._placement, _NAME) if x.requires_grad else None
        elif x._spec.placement != self._placement:
            raise RuntimeError(
                f"{_NAME}: score_mod or mask_mod reads {x._spec}, and the query is on "
                f"{self._placement}. Move it first: x.to_global(placement=q.placement)."
            )
        else:
            x_global = _whole(x)
        local = x if x_global is None else plain(x_global)
        self.known[id(x)] = x, local
        self.made.append(local)
        return local


def _whole(x: Any) -> Any:
    whole = (B,) * x._spec.placement.ndim
    return x if x._spec.sbp == whole else rebox(x, x._spec.with_sbp(whole), _NAME)


def _by_tensors(index: Any) -> bool:
    given = index if isinstance(index, tuple) else (index,)
    return all(isinstance(x, Tensor) and x.dtype is not torch.bool for x in given)


def _each(out: Any) -> Any:
    return out if isinstance(out, tuple | list) else (out,)
