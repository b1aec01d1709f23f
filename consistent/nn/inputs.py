"""Turn the plain tensors that a module is called with into global ones (``inputs=``).

```
rank 0 passes [3, 10]  \\
rank 1 passes [3, 10]   >  S(0): [8, 10], of which the ranks hold 3, 3 and 2 rows
rank 2 passes [2, 10]  /
```

Each rank passes its part of the batch, or all of it. Ranks exchange the sizes in one small
collective per call, since no rank knows alone whether a batch is the last, short one. Parts of
unbalanced sizes are evened out. In the first call, ranks also compare by a hash the tensors that
must be equal.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mirrored.every_rank import gather_from_ranks, lines_by_rank
from mirrored.transports.default import current

from ..dispatch.plans.shards import attach, compare_and_adopt, rebox
from ..dispatch.running.user_code import current_user_call
from ..movement.check_mode import digest
from ..movement.world import my_coordinate
from ..spec import (
    B,
    NdSbp,
    Placement,
    SbpLike,
    Split,
    TensorSpec,
    as_nd_sbp,
    as_sbp,
    resolve_dims,
    resolve_sbp,
)
from ..spec.nearest import suggestion
from ..spec.nested import map_tensors, tensors_in
from ..tensor.global_tensor import GlobalTensor
from ..tensor.making.create import from_local
from .uneven import balance_parts, joined_shape

_ALL_OTHERS = "*"


def install_inputs(
    module: torch.nn.Module, placement: Placement, inputs: SbpLike | Mapping[str, SbpLike]
) -> None:
    """Install a hook that makes plain arguments of ``module`` global tensors on ``placement``.

    ``inputs`` gives their layouts, as in ``parallelize``.
    """
    layouts = check_inputs(module, placement, inputs)
    hook = InputsHook(placement, inputs, layouts, _positional_names(module))
    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def inputs_of(module: torch.nn.Module) -> SbpLike | Mapping[str, SbpLike] | None:
    """Return the ``inputs`` that ``parallelize`` installed on ``module``; None without them."""
    hooks = module._forward_pre_hooks.values()
    return next((hook.given for hook in hooks if isinstance(hook, InputsHook)), None)


def check_inputs(
    module: torch.nn.Module, placement: Placement, inputs: SbpLike | Mapping[str, SbpLike]
) -> dict[str, NdSbp]:
    """Check the ``inputs`` of ``parallelize``, and return the layout of each argument by name.

    ``*`` stands for all other arguments: ``S(0)`` becomes ``{"*": (S(0),)}``.

    Raises:
        ValueError: a layout is partial or does not fit the axes, or a name is neither one of the
            axes nor one of the arguments.
    """
    axes = placement.axes or ()
    if not isinstance(inputs, Mapping):
        return {_ALL_OTHERS: _sbp_per_axis(inputs, placement)}
    if inputs and set(inputs) <= set(axes):
        sbps = {axis: as_sbp(sbp) for axis, sbp in inputs.items()}
        return {_ALL_OTHERS: _sbp_per_axis(tuple(sbps.get(axis, B) for axis in axes), placement)}
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in inputs:
        if name != _ALL_OTHERS and name not in parameters and not takes_any:
            raise ValueError(
                f"parallelize: inputs names {name!r}, which is neither an axis of {placement} nor "
                f"an argument of {type(module).__name__}.{suggestion(name, (*axes, *parameters))} "
                "Its arguments are "
                f"{', '.join(parameters)}; '*' stands for all others."
            )
    return {name: _sbp_per_axis(sbp, placement) for name, sbp in inputs.items()}


def _sbp_per_axis(sbp: SbpLike, placement: Placement) -> NdSbp:
    """Return ``sbp`` with an entry for each axis of ``placement``; a single B serves for all axes.

    Raises:
        ValueError: the number of entries differs from that of axes, or one is partial.
    """
    entries = as_nd_sbp(sbp)
    if entries == (B,):
        entries *= placement.ndim
    if len(entries) != placement.ndim:
        axes = placement.axes or ("dp", "tp")
        raise ValueError(
            f"parallelize: inputs={sbp} has {len(entries)} SBPs, and {placement} has "
            f"{placement.ndim} axes. Give one for each, such as (S(0), B), or name the axis: "
            f"inputs={{{axes[0]!r}: S(0)}}."
        )
    if any(entry.is_partial for entry in entries):
        raise ValueError(
            f"parallelize: inputs={sbp} makes addends of what ranks pass. Give S(dim) for parts, "
            "B for all of it; a tensor that is P is made by from_local."
        )
    return entries


class InputsHook:
    """Forward pre-hook that makes the plain tensors among a module's arguments global.

    In the first call, ranks also compare the tensors that must be equal on them. A class and not a
    closure, so that a module with the hook can be copied and pickled.

    Args:
        placement: the placement of the global tensors.
        given: ``inputs`` as the user gave it.
        ways: name of an argument, or ``*`` -> its SBPs.
        positions: the names of the positional arguments.
    """

    def __init__(
        self,
        placement: Placement,
        given: SbpLike | Mapping[str, SbpLike],
        ways: dict[str, NdSbp],
        positions: Sequence[str],
    ) -> None:
        self.placement, self.given, self.ways, self.positions = placement, given, ways, positions
        self.compared = False

    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        extra = [f"argument {i}" for i in range(len(self.positions), len(args))]
        arguments = {**dict(zip([*self.positions[: len(args)], *extra], args)), **kwargs}
        inputs = [
            (f"{type(module).__name__}({name}=)", x, sbp)
            for name, value in arguments.items()
            if (sbp := self._layout_of(name)) is not None
            for x in _plain_tensors(value)
        ]
        global_tensors = iter(self._make_global(inputs))
        new_arguments = {
            n: value if self._layout_of(n) is None else _replace_tensors(value, global_tensors)
            for n, value in arguments.items()
        }
        return tuple(list(new_arguments.values())[: len(args)]), {
            name: new_arguments[name] for name in kwargs
        }

    def _layout_of(self, name: str) -> NdSbp | None:
        """Return the layout of the argument ``name``; None if it stays plain."""
        return self.ways.get(name, self.ways.get(_ALL_OTHERS))

    def _make_global(self, inputs: Sequence[tuple[str, torch.Tensor, NdSbp]]) -> list[Any]:
        """Return the global tensors that the ranks' plain tensors make up.

        Args:
            inputs: (text about an argument, its tensor on this rank, its layout).
        """
        if current_user_call() is not None:
            return [_shard_of_whole(name, x, sbp, self.placement) for name, x, sbp in inputs]
        splits = any(isinstance(e, Split) for _, _, sbp in inputs for e in sbp)
        # Without parts, sizes need no exchange; values were compared in the first call.
        if not inputs or not (splits or not self.compared):
            return [_broadcast_input(x, self.placement) for _, x, _ in inputs]
        notes = _gather_notes(inputs, self.placement, not self.compared)
        global_tensors = [
            _global_from_part(
                name, x, sbp, self.placement, {r: note[i][:3] for r, note in notes.items()}
            )
            for i, (name, x, sbp) in enumerate(inputs)
        ]
        if not self.compared:
            _check_replicas(inputs, notes, self.placement)
        self.compared = True
        return global_tensors


def _positional_names(module: torch.nn.Module) -> list[str]:
    """Return the names of the positional arguments of the module's forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return [p.name for p in parameters if p.kind in kinds]


def _is_input(x: torch.Tensor) -> bool:
    return not isinstance(x, GlobalTensor) and x.ndim > 0


def _plain_tensors(value: Any) -> list[torch.Tensor]:
    """Return the plain tensors with dims in ``value``, which may be nested."""
    return [x for x in tensors_in(value) if _is_input(x)]


def _replace_tensors(value: Any, tensors: Any) -> Any:
    """Return ``value`` with each of its plain tensors replaced by the next of ``tensors``."""
    return map_tensors(value, lambda x: next(tensors) if _is_input(x) else x)


def _gather_notes(
    inputs: Sequence[tuple[str, torch.Tensor, NdSbp]], placement: Placement, hashed: bool
) -> dict[int, list[tuple]]:
    """Gather the shape, dtype, name and hash of each rank's tensors, by rank of the placement.

    The hash is "" if ``hashed`` is false, or for a tensor that no axis replicates. Ranks outside
    the placement take part, since they follow the module's ops on meta tensors.

    Raises:
        ValueError: ranks pass tensors of different names, dtypes or numbers of dims.
    """
    transport = current()
    inside = my_coordinate(placement) is not None
    note = [
        (
            tuple(x.shape),
            str(x.dtype).removeprefix("torch."),
            name,
            digest(x) if hashed and any(e is B for e in sbp) else "",
        )
        for name, x, sbp in inputs
    ]
    ranks = placement.ranks.ravel().tolist()
    participants = (
        tuple(ranks) if placement.size == transport.size else tuple(range(transport.size))
    )
    notes = dict(zip(participants, gather_from_ranks(note if inside else None, participants)))
    first = notes[ranks[0]]
    for rank in ranks[1:]:
        kinds = [[(n[2], n[1], len(n[0])) for n in notes[r] or ()] for r in (ranks[0], rank)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                "parallelize: ranks call the module with other arguments.\n"
                f"  rank {ranks[0]} passes {_note_text(first)}\n  rank {rank} passes "
                f"{_note_text(notes[rank])}\n"
                "  Pass tensors of the same dtype and number of dims under the same names on every "
                "rank."
            )
    return {rank: notes[rank] for rank in ranks}


def _note_text(note: Sequence[tuple]) -> str:
    return ", ".join(f"{n[2]} {n[1]} {list(n[0])}" for n in note) or "no plain tensor"


def _global_from_part(
    name: str,
    x: torch.Tensor,
    sbp: NdSbp,
    placement: Placement,
    notes: Mapping[int, tuple],
) -> Any:
    """Return the global tensor of which ``x`` is this rank's part.

    Parts of unbalanced sizes are evened out by sending rows.

    Args:
        name: the name of the argument, for errors.
        x: the tensor that this rank passes.
        sbp: the layout of the global tensor.
        placement: its placement.
        notes: rank -> (shape, dtype, name) of the tensor that the rank passes.

    Raises:
        ValueError: the parts do not fit together.
    """
    if not any(isinstance(entry, Split) for entry in sbp):
        shapes = {note[0] for note in notes.values()}
        if len(shapes) > 1:
            raise _unequal_error(name, "shapes", {r: str(list(n[0])) for r, n in notes.items()})
        return _broadcast_input(x, placement)
    at = my_coordinate(placement)
    shapes = {rank: note[0] for rank, note in notes.items()}
    sbp = resolve_dims(sbp, placement, shapes[placement.first_rank])
    shape = joined_shape(name, placement, sbp, shapes)
    spec = TensorSpec.of(placement, sbp, shape, x.dtype)
    balanced = all(shapes[r] == spec.local_shape(placement.coordinate_of(r)) for r in shapes)
    if at is None:
        return attach(torch.empty(spec.local_shape(None), dtype=x.dtype, device="meta"), spec)
    if not balanced:
        x = balance_parts(name, x, spec, shapes)
    return from_local(x, placement, sbp, shape=shape)


def _shard_of_whole(name: str, x: torch.Tensor, sbp: NdSbp, placement: Placement) -> Any:
    """Return the whole tensor ``x`` as a global tensor in the layout ``sbp``.

    Used inside a user's autograd Function, where ``x`` is the whole and not this rank's part.
    """
    spec = TensorSpec.of(placement, resolve_sbp(sbp, placement, x.shape), x.shape, x.dtype)
    return rebox(compare_and_adopt(x, placement, name), spec)


def _broadcast_input(x: torch.Tensor, placement: Placement) -> Any:
    """Return ``x``, which is the same on each rank, as a global tensor that is B on all axes."""
    return from_local(x, placement, (B,) * placement.ndim, shape=x.shape)


def _check_replicas(
    inputs: Sequence[tuple[str, torch.Tensor, NdSbp]],
    notes: Mapping[int, Sequence[tuple]],
    placement: Placement,
) -> None:
    """Raise on every rank if ranks pass different values of a tensor that they have replicated.

    Ranks are compared if they differ only along axes on which the tensor is B.

    Args:
        inputs: (text about an argument, its tensor on this rank, its layout).
        notes: rank -> (shape, dtype, name, hash) of each of its tensors.
        placement: the placement of the ranks.

    Raises:
        ValueError: the hashes of the values differ.
    """
    for i, (name, _, sbp) in enumerate(inputs):
        for rank, note in notes.items():
            at = placement.coordinate_of(rank)
            assert at is not None
            # The rank at coordinate 0 of each B axis stands for all ranks along these axes.
            reference_rank = placement.rank_at([0 if e is B else c for e, c in zip(sbp, at)])
            if notes[reference_rank][i][3] != note[i][3]:
                raise _unequal_error(name, "values", {r: notes[r][i][3] for r in notes})


def _unequal_error(name: str, what: str, by: Mapping[int, str]) -> ValueError:
    return ValueError(
        f"parallelize: {name} is to be whole along an axis (inputs=B there), and ranks along it "
        f"pass other {what}.\n"
        + lines_by_rank(by.values(), by)
        + "\n  Pass the same on these ranks (a sampler's rank is the coordinate along the axis "
        "that splits the batch), or say inputs=S(0) where each passes its part."
    )
