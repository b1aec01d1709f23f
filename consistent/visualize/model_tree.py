"""The parameters and buffers of a module as a tree of submodules, with equal layers folded.

```
GPT
  tok                 weight            f32[256, 64]  (S(0), B)
  blocks.0-11         12 modules of equal structure and layouts: one branch
    attn.qkv          weight, bias
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..dispatch.plans.shards import is_global
from ..nn.parallelize import plan_of
from ..nn.plan import Plan
from ..spec import Placement, TensorSpec, sbp_text


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter or buffer of a module, with its layout and size.

    Args:
        name: its name in its module.
        shape: dtype and shape as printed: ``f32[8, 4]``.
        layout: ``S(0)``, with ``used as B`` where a plan gathers the tensor for its use, or
            ``plain`` where each rank has a tensor of its own.
        spec: its spec, or None for a plain tensor.
        nbytes: bytes of the whole tensor, or 0 if it is tied to another entry, which counts them.
        numel: number of elements.
        is_parameter: whether it is a parameter rather than a buffer.
        tied: full name of the entry it is tied to, or "".
    """

    name: str
    shape: str
    layout: str
    spec: TensorSpec | None
    nbytes: int
    numel: int
    is_parameter: bool
    tied: str = ""

    def held_by(self, rank: int) -> int:
        """Return the bytes that ``rank`` holds. Each rank holds a plain tensor whole."""
        return 0 if self.tied else _bytes_on_rank(self.spec, rank, self.nbytes)

    @property
    def held(self) -> int:
        """Bytes of the largest shard that a rank holds."""
        return 0 if self.tied else self.nbytes if self.spec is None else self.spec.largest_nbytes


@dataclass(frozen=True, slots=True)
class Branch:
    """Module in the tree: its own tensors and its submodules.

    ``times`` is the number of consecutive equal modules, such as layers, that this one stands for.
    """

    name: str
    kind: str
    entries: tuple[Entry, ...] = ()
    branches: tuple[Branch, ...] = ()
    times: int = 1

    def all_entries(self, times: int = 1) -> Iterator[tuple[int, Entry]]:
        """Yield (number of occurrences, entry) for this module and all modules below it.

        ``times`` is the number of occurrences of this module's parent.
        """
        yield from ((times * self.times, entry) for entry in self.entries)
        for branch in self.branches:
            yield from branch.all_entries(times * self.times)

    @property
    def nbytes(self) -> int:
        """Bytes of all whole tensors in the module."""
        return sum(n * entry.nbytes for n, entry in self.all_entries())

    @property
    def parameters(self) -> int:
        """Number of elements of the module's parameters."""
        return sum(n * e.numel for n, e in self.all_entries() if e.is_parameter and not e.tied)

    def held_by(self, rank: int) -> int:
        """Return the bytes of the module that ``rank`` holds."""
        return sum(n * entry.held_by(rank) for n, entry in self.all_entries())

    @property
    def placements(self) -> list[Placement]:
        """Placements of the module's tensors, each once, in the order met."""
        specs = (entry.spec for _, entry in self.all_entries())
        return list(dict.fromkeys(spec.placement for spec in specs if spec is not None))

    @property
    def held(self) -> int:
        """Bytes that the fullest rank holds.

        Only the first rank of each placement is considered, which has the largest pieces.
        """
        firsts = {placement.first_rank for placement in self.placements} or {0}
        return max(map(self.held_by, firsts))


@dataclass(slots=True)
class _BuildState:
    """State while the tree of a module is built: the plan, and the tensors met so far.

    Args:
        plan: plan of the module; None if it was not parallelized.
        names_by_id: id of each tensor so far -> its full name, by which tied tensors are found.
    """

    plan: Plan | None
    names_by_id: dict[int, str] = field(default_factory=dict)


def tree_of(module: nn.Module) -> Branch:
    """Return the tree of the submodules of ``module``.

    Consecutive equal layers, such as ``blocks.0`` to ``blocks.11``, are one branch.
    """
    try:
        plan = plan_of(module)
    except ValueError:  # the module was not parallelized
        plan = None
    return _make_branch("", module, "", _BuildState(plan))


def _make_branch(name: str, module: nn.Module, path: str, state: _BuildState) -> Branch:
    # Not named_parameters(), which leaves out tied tensors after the first.
    tensors = [(n, x, True) for n, x in module._parameters.items() if x is not None]
    tensors += [(n, x, False) for n, x in module._buffers.items() if x is not None]
    entries = tuple(_make_entry(n, x, kind, path, state) for n, x, kind in tensors)
    children = [
        _make_branch(n, child, f"{path}{n}.", state)
        for n, child in module._modules.items()
        if child is not None
    ]
    non_empty = [b for b in children if b.entries or b.branches]
    return _join_single_child(
        Branch(name, type(module).__name__, entries, tuple(_fold_equal(non_empty)))
    )


def _make_entry(name: str, x: torch.Tensor, kind: bool, path: str, state: _BuildState) -> Entry:
    if is_lazy(x):
        return Entry(name, "not known yet", "plain", None, 0, 0, kind)
    first = state.names_by_id.setdefault(id(x), path + name)
    tied = first if first != path + name else ""
    spec: TensorSpec | None = x._spec if is_global(x) else None  # type: ignore[attr-defined]
    if spec is None:
        shape = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        nbytes, layout = x.numel() * x.dtype.itemsize, "plain"
    else:
        shape = (
            repr(spec).partition(" ")[0] if not spec.shape else repr(spec).partition("] ")[0] + "]"
        )
        nbytes, layout = spec.nbytes, sbp_text(spec.sbp)
        planned = state.plan.layouts(path + name) if state.plan is not None else None
        if planned is not None and planned.on(spec.placement).sbp == spec.sbp:
            layout = sbp_text(planned.sbp)
            layout += f", used as {sbp_text(planned.use)}" if planned.use != planned.sbp else ""
    return Entry(name, shape, layout, spec, 0 if tied else nbytes, x.numel(), kind, tied)


def _fold_equal(branches: Sequence[Branch]) -> list[Branch]:
    """Replace consecutive equal branches whose names are numbers, such as layers, by one.

    Branches "0", "1" and "2" of equal contents become "0-2" with ``times`` 3.
    """
    folded: list[Branch] = []
    for branch in branches:
        last = folded[-1] if folded else None
        if last is not None and _is_next_equal(last, branch):
            first = last.name.partition("-")[0]
            folded[-1] = replace(last, name=f"{first}-{branch.name}", times=last.times + 1)
        else:
            folded.append(branch)
    return folded


def _is_next_equal(last: Branch, branch: Branch) -> bool:
    first, _, end = last.name.partition("-")
    numbered = first.isdigit() and branch.name.isdigit()
    if not numbered or int(end or first) + 1 != int(branch.name):
        return False
    return replace(last, name="", times=1) == replace(branch, name="", times=1)


def _join_single_child(branch: Branch) -> Branch:
    """Return the only submodule of ``branch``, named ``a.b``, if it contains nothing else.

    Otherwise return ``branch``.
    """
    only_child = branch.branches[0] if len(branch.branches) == 1 and not branch.entries else None
    if not branch.name or only_child is None:
        return branch
    name = f"{branch.name}.{only_child.name}"
    return replace(only_child, name=name)


def _bytes_on_rank(spec: TensorSpec | None, rank: int, nbytes: int) -> int:
    if spec is None:
        return nbytes
    coordinate = spec.placement.coordinate_of(rank)
    return 0 if coordinate is None else _shard_bytes(spec, coordinate)


def _shard_bytes(spec: TensorSpec, coordinate: tuple[int, ...]) -> int:
    count = spec.dtype.itemsize
    for size in spec.local_shape(coordinate):
        count *= size
    return count


@dataclass(frozen=True, slots=True)
class PictureRow:
    """Line of a model's picture: a module with the sums over its contents, or a tensor.

    Args:
        depth: depth of indentation.
        times: number of equal modules that the line stands for.
        shape: dtype and shape; for a module, its class.
        held, nbytes: bytes that a rank holds, and bytes of the whole.
        entry: the tensor; None for a module.
    """

    depth: int
    name: str
    times: int
    shape: str
    layout: str
    held: int
    nbytes: int
    entry: Entry | None


def rows(branch: Branch, depth: int = 0, several: bool | None = None) -> Iterator[PictureRow]:
    """Yield the lines of the tree ``branch``, the module first.

    The line of a layer that occurs several times counts all of them; the lines below it describe
    one of them. A module with one tensor and nothing else shares a line with it.

    Args:
        depth: depth of indentation of the module.
        several: whether the tensors of the whole model are on several placements, so that each line
            names its own; None: find out.
    """
    name, kind = branch.name or branch.kind, branch.kind if branch.name else ""
    several = len(branch.placements) > 1 if several is None else several
    sums = branch.held, branch.nbytes
    if branch.name and len(branch.entries) == 1 and not branch.branches:
        (e,) = branch.entries
        layout = _layout_text(e, several)
        yield PictureRow(depth, f"{name}.{e.name}", branch.times, e.shape, layout, *sums, e)
        return
    yield PictureRow(depth, name, branch.times, kind, "", *sums, None)
    for e in branch.entries:
        yield PictureRow(
            depth + 1, e.name, 1, e.shape, _layout_text(e, several), e.held, e.nbytes, e
        )
    for child in branch.branches:
        yield from rows(child, depth + 1, several)


def _layout_text(entry: Entry, several: bool) -> str:
    layout = f"tied to {entry.tied}" if entry.tied else entry.layout
    if several and entry.spec is not None:
        layout += f" on {_ranks_text(entry.spec.placement)}"
    return layout


def _ranks_text(placement: Placement) -> str:
    ranks = placement.ranks.ravel().tolist()
    if ranks == list(range(ranks[0], ranks[0] + len(ranks))) and len(ranks) > 2:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 4 else f"{len(ranks)} ranks"
