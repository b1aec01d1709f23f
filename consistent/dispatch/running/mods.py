"""The user functions of ``flex_attention``: ``score_mod`` and ``mask_mod``.

They may read tensors other than their arguments, by closures, attributes or globals. A first call
on single indices finds these tensors, the same on all ranks: each rank then holds the whole of a
global tensor, and a plain tensor counts as B. The gradient of such a tensor is summed over the
ranks, since each rank computes only its own part of the scores. If a block mask is made from a
``mask_mod``, each rank makes the whole of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...spec import B, Placement
from ..plans.shards import adopt, compare, is_global, plain, rebox

_OP_NAME = "flex_attention"
_getitem = torch.Tensor.__getitem__
_is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore
Places = tuple[Tensor, Tensor, Tensor, Tensor]


class Mods:
    """The ``score_mod`` and ``mask_mod`` of one ``flex_attention`` call, as one argument of an op.

    All instances are equal, so the key of the call, and its plan, do not depend on the functions. A
    plan keeps the arguments that it was made with, so ``clear`` is called after a call to drop the
    references to the functions.
    """

    def __init__(self, score_mod: Callable | None, block_mask: Any, placement: Placement) -> None:
        self._score, self._block_mask = score_mod, block_mask
        self._mask = None if block_mask is None else block_mask.mask_mod
        self._placement = placement
        self._reads = _Reads(placement)
        self._blocks: Tensor | None = None

    def __eq__(self, other: object) -> bool:
        return other.__class__ is Mods

    def __hash__(self) -> int:
        return hash(Mods)

    def __repr__(self) -> str:
        return "mods"

    def clear(self) -> None:
        """Drop the functions and the tensors that they read, so that no plan keeps them alive."""
        self._score = self._mask = self._block_mask = self._blocks = None
        self._reads = _Reads(self._placement)

    def find_tensors(self, device: torch.device, dtype: torch.dtype) -> None:
        """Call the functions once, on index 0, to find what tensors they read. A collective."""
        if self._block_mask is not None:
            for x in (self._block_mask.kv_num_blocks, self._block_mask.kv_indices):
                compare(x, self._placement, "the block mask of flex_attention")
        places = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
        score = torch.zeros((), dtype=dtype, device=device)
        # The arguments of the functions are not tensors that they read on their own.
        self._reads.own_tensors += [*places, score]
        with self._reads:
            if self._score is not None:
                self._score(score, *places)
            if self._mask is not None:
                self._mask(*places)
        self._reads.is_first_call = False

    # -- for the form ------------------------------------------------------------------------------

    @property
    def tensors_with_grad(self) -> list[Tensor]:
        """The tensors that the functions read and that require grad."""
        return [x for _, x in self._reads.replacements.values() if x.requires_grad]

    @property
    def block_size(self) -> tuple[int, int]:
        """(query rows, keys) that one block of the block mask covers."""
        return (1, 1) if self._block_mask is None else self._block_mask.BLOCK_SIZE

    def attended_blocks(self) -> Tensor | None:
        """Return a matrix on the CPU: whether any row of block i attends to any key of block j.

        The form skips the keys that no row attends to. Returns None if there is no mask, or a
        single block.
        """
        mask = self._block_mask
        if mask is None or mask.kv_indices.shape[-1] == 1 == mask.kv_indices.shape[-2]:
            return None
        if self._blocks is None:
            self._blocks = mask.to_dense().flatten(0, -3).any(0).cpu()
        return self._blocks

    def scores(self, scores: Tensor, at: Places) -> Tensor:
        """Apply ``score_mod`` to ``scores``, a block of [batch, head, row, key].

        ``at`` are the batch, head, row and key indices of the block, each 1-d.
        """
        if self._score is None:
            return scores
        with self._reads:
            return _vmap_over_places(self._score, (0,))(scores, *at)

    def mask(self, at: Places) -> Tensor | None:
        """Return the mask, by ``mask_mod``, of which row may attend to which key.

        ``at`` are as in ``scores``. Returns None if every row may attend to every key.
        """
        if self._mask is None:
            return None
        with self._reads:
            return _vmap_over_places(self._mask, ())(*at)


def _vmap_over_places(function: Callable, first: tuple[int, ...]) -> Callable:
    """Vectorize a mod, which takes single indices, over batches, heads, rows and keys.

    ``first`` are the ``in_dims`` of its arguments before the indices: ``(0,)`` for the score of a
    ``score_mod``, none for a ``mask_mod``.
    """
    # The last vmap is the outermost, over batches.
    for place in (3, 2, 1, 0):
        dims = [0 if i == place else None for i in range(4)]
        function = torch.vmap(function, in_dims=(*first, *dims))
    return function


class ReadWholeValues(TorchFunctionMode):
    """Mode in which ops read the whole value of each global tensor, as a plain tensor.

    Entered while user functions run that compute with plain tensors and may reach global ones.
    """

    def __init__(self) -> None:
        super().__init__()
        # id -> (the tensor, its replacement)
        self.replacements: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        args = tuple(map(self._replace_globals, args))
        kwargs = {key: self._replace_globals(x) for key, x in (kwargs or {}).items()}
        if func is _getitem and _is_tensor_index(args[1]):
            # Under vmap, Tensor.__getitem__ would read an index tensor's value as a number.
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return torch.ops.aten.index(args[0], index)
        return func(*args, **kwargs)

    def _replace_globals(self, x: Any) -> Any:
        if isinstance(x, tuple | list):
            return type(x)(map(self._replace_globals, x)) if type(x) in (tuple, list) else x
        if not isinstance(x, Tensor):
            return x
        entry = self.replacements.get(id(x))
        if entry is not None:
            return entry[1]
        return self._read_whole(x) if self._is_read(x) else x

    def _is_read(self, x: Tensor) -> bool:
        return is_global(x)

    def _read_whole(self, x: Any) -> Tensor:
        # Holding ``x`` keeps its id from being reused.
        self.replacements[id(x)] = x, plain(_box_to_broadcast(x))
        return self.replacements[id(x)][1]


class _Reads(ReadWholeValues):
    """Mode that replaces each tensor that the mods read by a plain tensor with all of its values.

    While ``is_first_call`` is set, plain tensors that they read are noted, too. Once it is cleared,
    reading a global tensor that was not read before raises.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self._placement = placement
        self.is_first_call = True
        # Tensors that the functions made, or got, in the first call.
        self.own_tensors: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        if self.is_first_call:
            self.own_tensors += [x for x in _as_tuple(out) if isinstance(x, Tensor)]
        return out

    def _is_read(self, x: Tensor) -> bool:
        # A tensor that the functions did not make themselves was read from outside.
        return is_global(x) or self.is_first_call and not any(x is y for y in self.own_tensors)

    def _read_whole(self, x: Any) -> Tensor:
        if not self.is_first_call:
            raise RuntimeError(
                f"{_OP_NAME}: score_mod or mask_mod reads a global tensor, {x._spec}, "
                "that it did not read when it was called for place 0. Read all tensors in each "
                "call."
            )
        if _is_wrapped(x):
            return x
        if not is_global(x):
            compare(x, self._placement, _OP_NAME)
            x_global = adopt(x, self._placement, _OP_NAME) if x.requires_grad else None
        elif x._spec.placement != self._placement:
            raise RuntimeError(
                f"{_OP_NAME}: score_mod or mask_mod reads {x._spec}, and the query is on "
                f"{self._placement}. Move it first: x.to_global(placement=q.placement)."
            )
        else:
            x_global = _box_to_broadcast(x)
        local = x if x_global is None else plain(x_global)
        self.replacements[id(x)] = x, local
        self.own_tensors.append(local)
        return local


def _box_to_broadcast(x: Any) -> Any:
    sbp = (B,) * x._spec.placement.ndim
    return x if x._spec.sbp == sbp else rebox(x, x._spec.with_sbp(sbp), _OP_NAME)


def _is_tensor_index(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(isinstance(x, Tensor) and x.dtype is not torch.bool for x in items)


def _as_tuple(out: Any) -> Any:
    return out if isinstance(out, tuple | list) else (out,)
