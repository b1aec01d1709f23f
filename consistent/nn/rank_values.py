"""Broadcast one rank's values of a module, and check that all ranks have the same module."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch

from mirrored.every_rank import gather_from_ranks
from mirrored.transports.default import current

from ..movement.check_mode import digest
from ..movement.settings import MAY_DIFFER, first_difference, settings
from ..movement.sparse_parts import fill, is_sparse, tensors_of_sparse
from ..movement.world import device_of
from ..spec import Placement
from .plan import Layouts, Plan, nd_text
from .plan.layouts import CODEC_FIELDS, codecs_text
from .plan.table import border_text
from .slots import Slot

# Bytes of one broadcast: large enough that the number of messages does not matter, and small
# compared to a module that fills the memory.
BUCKET = 64 << 20


def check_equal_modules(
    module: torch.nn.Module, tensors: Sequence[Sequence[Slot]], placement: Placement, plan: Plan
) -> None:
    """Raise on every rank of the placement if the ranks' modules, plans or settings differ.

    Compares tensors, modes and constants of the modules, the plan's layouts, and the settings of
    torch, in one small collective. Warns if only the numbers of threads differ.

    Args:
        module: the module, whose submodules are compared.
        tensors: for each tensor, the places in the module that hold it.
        placement: the ranks.
        plan: the plan for the module.

    Raises:
        ValueError: the message names the first difference and the values of two ranks.
    """
    lines = [_tensor_text(places, plan) for places in tensors]
    lines += [border_text(name, border) for name, border in plan.modules.items()]
    lines += [f"a plan with keep_bytes={plan.keep_bytes}"]
    constants = [_module_text(name, part) for name, part in module.named_modules()]
    ranks = tuple(placement.ranks.ravel().tolist())
    notes = gather_from_ranks((lines, constants, settings()), ranks)
    _check_settings(ranks, [note[2] for note in notes])
    for kind in (0, 1):
        _check_notes(ranks, [note[kind] for note in notes])


def _check_notes(ranks: Sequence[int], notes: Sequence[list[str]]) -> None:
    """Raise if ranks describe their modules by different lines of text.

    Raises:
        ValueError: the message has a line that only one of two ranks has.
    """
    for rank, note in zip(ranks, notes):
        if note != notes[0]:
            first_line = next((n for n in notes[0] if n not in note), "fewer tensors")
            other_line = next((n for n in note if n not in notes[0]), "fewer tensors")
            raise ValueError(
                "parallelize: the ranks' modules, or their plans, differ.\n"
                f"  rank {ranks[0]} has {first_line}\n  rank {rank} has {other_line}\n"
                "  Build the same module on every rank (class, configuration, dtype, mode), and "
                "give the same plan."
            )


def _check_settings(ranks: Sequence[int], notes: Sequence[dict[str, str]]) -> None:
    """Raise if a setting of torch differs between ranks; only warn for the number of threads.

    Raises:
        ValueError: the message names the setting and its values.
    """
    name = first_difference(notes)
    if name is None:
        return
    lines = "\n".join(f"  rank {rank}: {note.get(name)}" for rank, note in zip(ranks, notes))
    message = (
        f"parallelize: the {name} differs between ranks.\n{lines}\n"
        "  Each rank computes by its own, so that what all have whole would differ. Set it alike "
        "on every rank."
    )
    if name != MAY_DIFFER:
        raise ValueError(message)
    warnings.warn(message, stacklevel=3)


def _module_text(name: str, module: torch.nn.Module) -> str:
    """Return a text about a module's class, constants and mode, for comparison between ranks.

    For example ``drop: Dropout(p=0.1, inplace=False), training``. Constants are those that torch's
    own modules print.
    """
    kind = type(module)
    constants = module.extra_repr() if kind.__module__.startswith("torch.nn.") else ""
    mode = "training" if module.training else "evaluating"
    return f"{name or 'the module'}: {kind.__name__}({constants}), {mode}"


def layouts_text(layouts: Layouts | None) -> str:
    """Return a tensor's layout and codecs as text, for errors: ``S(0)``, ``S(0)/B/S(0)/S(0)``.

    The second form has its layouts in storage, in use, of the gradient and in the step, which are
    written only if they differ.
    """
    if layouts is None:
        return "left plain"
    sides = (layouts.sbp, layouts.use, layouts.grad, layouts.step)
    sbp_text = nd_text(layouts.sbp) if layouts.is_one else "/".join(map(nd_text, sides))
    codecs = [
        f"{name} by {codecs_text(x)}" for name in CODEC_FIELDS if (x := getattr(layouts, name))
    ]
    return ", ".join([sbp_text, *codecs])


def _tensor_text(places: Sequence[Slot], plan: Plan) -> str:
    """Return a text about a tensor's names, dtype, shape and layouts, for comparison between ranks.

    For example ``fc.weight: float32 [8, 4] S(0)``.
    """
    value = places[0].value
    where = "on meta, " if value.is_meta else ""
    dtype = str(value.dtype).removeprefix("torch.")
    names = " = ".join(slot.name for slot in places)
    kind = f"{str(value.layout)[6:]}, " if value.layout is not torch.strided else ""
    text = layouts_text(plan.layouts(places[0].name))
    return f"{names}: {dtype} {list(value.shape)} {kind}{where}{text}"


def broadcast_values(what: str, tensors: Sequence[Sequence[Slot]], placement: Placement) -> None:
    """Broadcast the values of the placement's first rank to all of its ranks.

    Takes one broadcast for each dtype, or for each 64 MB of it. Tensors on ``meta`` are skipped. Of
    sparse tensors the indices and values are sent, whose number may differ between ranks.

    Args:
        what: the name of the caller.
        tensors: for each tensor, the places in a module that hold it. Except on the first rank, the
            tensors are overwritten in place.
        placement: the ranks.
    """
    if placement.size == 1:
        return
    values = [places[0].value for places in tensors if not places[0].value.is_meta]
    sparse = [value for value in values if is_sparse(value)]
    sparse_parts = _sparse_parts(sparse, placement)
    values = [value for value in values if not is_sparse(value)]
    values += [part for parts, _ in sparse_parts for part in parts]
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for value in values:
        if value.numel():
            by_dtype.setdefault(value.dtype, []).append(value)
    for same_dtype in by_dtype.values():
        for bucket in _buckets(same_dtype):
            _broadcast_bucket(bucket, placement)
    if current().rank != placement.first_rank:
        for value, (parts, is_coalesced) in zip(sparse, sparse_parts, strict=True):
            fill(value, parts, is_coalesced)


def _sparse_parts(
    sparse: Sequence[torch.Tensor], placement: Placement
) -> list[tuple[Sequence[torch.Tensor], bool]]:
    """Return the dense parts (indices, values) of each sparse tensor, and whether it is coalesced.

    The first rank of the placement returns its own parts, to send from; the others return empty
    tensors of the same sizes, to receive into. The sizes are gathered in one small collective.
    """
    if not sparse:
        return []
    dense_parts = [tensors_of_sparse(x) for x in sparse]
    metadata = [
        ([(tuple(part.shape), part.dtype) for part in parts], _is_coalesced(x))
        for x, parts in zip(sparse, dense_parts, strict=True)
    ]
    metadata = gather_from_ranks(metadata, tuple(placement.ranks.ravel().tolist()))[0]
    if current().rank != placement.first_rank:
        dense_parts = [
            tuple(torch.empty(size, dtype=dtype) for size, dtype in sizes) for sizes, _ in metadata
        ]
    return [(parts, flag) for parts, (_, flag) in zip(dense_parts, metadata, strict=True)]


def _is_coalesced(x: torch.Tensor) -> bool:
    return x.layout is torch.sparse_coo and x.is_coalesced()


def _buckets(values: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Divide ``values``, in order, into lists of at most ``BUCKET`` bytes each.

    A larger tensor gets a list of its own.
    """
    bucket: list[torch.Tensor] = []
    size = 0
    for value in values:
        if bucket and size + value.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(value)
        size += value.nbytes
    yield bucket


def _broadcast_bucket(values: Sequence[torch.Tensor], placement: Placement) -> None:
    """Broadcast ``values``, all of one dtype, from the first rank in one message, in place."""
    first, ranks = placement.first_rank, tuple(placement.ranks.ravel().tolist())
    sample = values[0]
    numel = sum(value.numel() for value in values)
    is_sender = current().rank == first
    device = device_of(placement)
    pieces = [value.detach().reshape(-1).to(device) for value in values] if is_sender else []
    flat = torch.cat(pieces) if is_sender else None
    received = current().broadcast(flat, (numel,), sample.dtype, device, first, ranks)
    if is_sender:
        return
    for value, piece in zip(values, received.split([value.numel() for value in values])):
        if any(n > 1 and not step for n, step in zip(value.shape, value.stride())):
            # An expanded tensor has several elements in one place, so it cannot be written.
            value.data = piece.view(value.shape).clone()
        else:
            value.data.copy_(piece.view(value.shape))


def check_values(what: str, tensors: Sequence[Sequence[Slot]], placement: Placement) -> None:
    """Raise on every rank of the placement if a tensor's values differ; one small collective.

    Args:
        what: the name of the caller, for the error.
        tensors: for each tensor, the places in a module that hold it.
        placement: the ranks.

    Raises:
        ValueError: the message names the first tensor that differs.
    """
    ranks = tuple(placement.ranks.ravel().tolist())
    digests = {places[0].name: digest(places[0].value) for places in tensors}
    notes = gather_from_ranks(digests, ranks)
    for rank, note in zip(ranks, notes):
        for name, value in note.items():
            if value != notes[0].get(name):
                raise ValueError(
                    f"{what}: {name!r} differs between ranks.\n"
                    f"  rank {ranks[0]} has {notes[0].get(name)}\n  rank {rank} has {value}\n"
                    "  Make the values equal (same seed, same file), or leave out check=True, and "
                    f"every rank takes those of rank {ranks[0]}."
                )
