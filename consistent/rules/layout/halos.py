"""Halos of ops whose outputs read elements from elsewhere along a dim.

These are slices, windows, pads, rolls, flips, differences, repeats and regrouped dims.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..halo.halo import HALOS, Halo, Ranges
from ..halo.spatial import window_ranges
from ..signature import Call, DoesNotFit
from .subscript import subscript_of
from .view import splittable_dims


def wrapped_ranges(first: int, end: int, n: int) -> Ranges:
    """Return the positions ``[first, end)`` modulo ``n``, as ranges within a dim of ``n`` items.

    ``wrapped_ranges(-1, 2, 4)`` is ``[(3, 4), (0, 2)]``.
    """
    ranges: Ranges = []
    while first < end:
        a = first % n
        b = min(n, a + end - first)
        ranges.append((a, b))
        first += b - a
    return ranges


def _unfold_halo(call: Call, d: int) -> Halo | None:
    if d != call.dim("dim"):
        return None
    return Halo(d, window_ranges(call.get("step"), 0, call.get("size")))


def _slice_halo(call: Call, d: int) -> Halo | None:
    index = subscript_of(call)
    if index.tensors:
        return None
    for item in index.of_kind("slice"):
        if item.dim == d:
            return Halo(index.out_dims[d], window_ranges(item.step, -item.start, 1))
    return None


def pads_of_dim(call: Call, d: int) -> tuple[int, int]:
    """Return how many elements a pad adds before and after dim ``d``.

    The argument ``pad`` has a pair for each dim, from the last dim on; other dims get (0, 0).
    """
    pad = call.get("pad")
    k = 2 * (call.operands[0].ndim - 1 - d)
    return (pad[k], pad[k + 1]) if k < len(pad) else (0, 0)


def pad_mode(call: Call) -> str:
    """Return the mode of a pad, "constant" if the op has none."""
    return call.get("mode", "constant") if "mode" in call.params else "constant"


def pad_source_index(mode: str, place: int, n: int) -> int:
    """Return the index in a dim of ``n`` items whose value a pad puts at position ``place``.

    Position -2 is index 0 with mode "replicate", and index 2 with mode "reflect". A position inside
    the dim is its own index.
    """
    if 0 <= place < n:
        return place
    if mode == "replicate":
        return 0 if place < 0 else n - 1
    return -place if place < 0 else 2 * (n - 1) - place


def _pad_halo(call: Call, d: int) -> Halo | None:
    """Return the halo of a pad along dim ``d``.

    None if another mode than "constant" has a negative padding, which cuts elements off.
    """
    mode, n, (before, after) = pad_mode(call), call.operands[0].shape[d], pads_of_dim(call, d)
    if mode == "constant":
        return Halo(d, lambda o, e: [(o - before, e - before)])
    if before < 0 or after < 0:  # torch also wraps and reflects elements that are cut off
        return None
    if mode == "circular":
        return Halo(d, lambda o, e: wrapped_ranges(o - before, e - before, n))

    def ranges(o: int, e: int) -> Ranges:
        indices = [pad_source_index(mode, place - before, n) for place in range(o, e)]
        return [(min(indices), max(indices) + 1)] if indices else []

    return Halo(d, ranges)


def roll_shifts(call: Call) -> dict[int, int]:
    """Return {dim: shift} of a roll or fftshift; empty if it rolls the flattened tensor.

    ``roll(x, (1, 2), dims=(0, -1))`` of a matrix gives ``{0: 1, 1: 2}``.
    """
    if call.name in ("fft_fftshift", "fft_ifftshift"):
        back = call.name == "fft_ifftshift"
        return {d: (call.operands[0].shape[d] + back) // 2 for d in call.dims("dim")}
    dims_argument, amounts = call.get("dims"), call.get("shifts")
    if dims_argument is None or dims_argument == () or dims_argument == []:
        return {}
    dims, amounts = (v if isinstance(v, Sequence) else (v,) for v in (dims_argument, amounts))
    shift_by_dim: dict[int, int] = {}
    for d, shift in zip(dims, amounts, strict=True):
        d %= max(1, call.operands[0].ndim)
        shift_by_dim[d] = shift_by_dim.get(d, 0) + shift
    return shift_by_dim


def _roll_halo(call: Call, d: int) -> Halo | None:
    shift_by_dim, n = roll_shifts(call), call.operands[0].shape[d]
    return (
        Halo(d, lambda o, e: wrapped_ranges(o - shift_by_dim[d], e - shift_by_dim[d], n))
        if d in shift_by_dim
        else None
    )


def _flip_halo(call: Call, d: int) -> Halo | None:
    n = call.operands[0].shape[d]
    return Halo(d, lambda o, e: [(n - e, n - o)])


def _rot90_halo(call: Call, d: int) -> Halo | None:
    """Return the halo of rot90 along dim ``d``, which is reversed, becomes the other dim, or both.

    None for a dim that does not take part, or if the rotation is a full turn.
    """
    n, turns, dims = call.operands[0].shape[d], call.get("k", 1) % 4, call.dims("dims", (0, 1))
    if d not in dims or turns == 0:
        return None
    place = d if turns == 2 else dims[1 - dims.index(d)]
    if turns == 2 or (turns == 1) == (d == dims[1]):
        return Halo(place, lambda o, e: [(n - e, n - o)])
    return Halo(place, lambda o, e: [(o, e)])


def _diff_halo(call: Call, d: int) -> Halo | None:
    order = call.get("n", 1)
    if d != call.dim("dim", -1) or len(call.operands) > 1 or order < 1:
        return None
    return Halo(d, lambda o, e: [(o, e + order)] if o < e else [])


def int_arguments(call: Call, name: str) -> tuple[int, ...]:
    """Return the ints in the argument ``name``, in each way in which torch takes them.

    ``x.repeat(2, 3)``, ``x.repeat([2, 3])`` and ``x.repeat(repeats=[2, 3])`` all give (2, 3).

    Raises:
        DoesNotFit: one of them is a tensor.
    """
    value = call.kwargs.get(name, call.args[1:])
    while isinstance(value, Sequence) and len(value) == 1 and isinstance(value[0], Sequence):
        value = value[0]
    ints = (value,) if isinstance(value, int) else tuple(value)
    if not all(isinstance(n, int) for n in ints):
        raise DoesNotFit(f"{name} holds tensors")
    return ints


def repeat_counts(call: Call) -> tuple[int, ...]:
    """Return how often repeat and tile repeat each dim of the result, including new dims in front.

    tile may name fewer dims than the tensor has: the others are repeated once.
    """
    times = int_arguments(call, "repeats" if call.name == "repeat" else "dims")
    return (1,) * (call.operands[0].ndim - len(times)) + times


def _repeat_halo(call: Call, d: int) -> Halo | None:
    x, place = call.operands[0], len(repeat_counts(call)) - call.operands[0].ndim + d
    return Halo(place, lambda o, e: wrapped_ranges(o, e, x.shape[d]))


def _repeat_interleave_halo(call: Call, d: int) -> Halo | None:
    """Return the halo of repeat_interleave by a number ``times``: output k needs item k // times.

    None if the numbers are a tensor or the call gives ``output_size``.
    """
    times = call.get("repeats")
    if not isinstance(times, int) or times < 1 or call.get("output_size") is not None:
        return None
    if d != call.dim("dim", 0) or (call.get("dim") is None and call.operands[0].ndim != 1):
        return None
    return Halo(d, lambda o, e: [(o // times, (e - 1) // times + 1)] if o < e else [])


def _view_halo(call: Call, d: int) -> Halo | None:
    """Return the halo of view, reshape, ... along ``d``: the input items that contain the outputs.

    [5, 4] -> [20]: the outputs [7, 14) are in the rows [1, 4). None if ``d`` is not the first dim
    of a group of dims that are merged or divided (see ``view.splittable_dims``).
    """
    all_heads = splittable_dims(call.operands[0].shape, call.outs[0].shape)
    matches = [head[1:] for head in all_heads if head[0] == d]
    if not matches or not all(matches[0][::2]):
        return None
    ((span, place, out_span),) = matches
    # Whole items: the start rounds down, and the end rounds up.
    return Halo(place, lambda o, e: [(o * out_span // span, -(-e * out_span // span))])


_VIEWS = "_unsafe_view flatten ravel reshape unflatten view"

HALOS.update(
    {
        "constant_pad_nd": _pad_halo, "diff": _diff_halo, "fft_fftshift": _roll_halo,
        "fft_ifftshift": _roll_halo, "flip": _flip_halo, "fliplr": _flip_halo, "flipud": _flip_halo,
        "getitem": _slice_halo, "narrow": _slice_halo, "narrow_copy": _slice_halo, "pad": _pad_halo,
        "repeat": _repeat_halo, "repeat_interleave": _repeat_interleave_halo, "roll": _roll_halo,
        "rot90": _rot90_halo, "slice": _slice_halo,
        "tile": _repeat_halo,
        "unfold": _unfold_halo, **dict.fromkeys(_VIEWS.split(), _view_halo),
    }
)  # fmt: skip
