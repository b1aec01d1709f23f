"""Halos of ops whose outputs read elements from elsewhere along a dim.

These are slices, windows, pads, rolls, flips, differences, repeats and regrouped dims.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..halo.halo import HALOS, Halo, Ranges
from ..halo.spatial import sliding
from ..signature import Call, DoesNotFit
from .subscript import subscript_of
from .view import heads


def wrapped(first: int, end: int, n: int) -> Ranges:
    """Return the positions ``[first, end)`` modulo ``n``, as ranges within a dim of ``n`` items.

    ``wrapped(-1, 2, 4)`` is ``[(3, 4), (0, 2)]``.
    """
    found: Ranges = []
    while first < end:
        a = first % n
        b = min(n, a + end - first)
        found.append((a, b))
        first += b - a
    return found


def _unfolded(call: Call, d: int) -> Halo | None:
    if d != call.dim("dim"):
        return None
    return Halo(d, sliding(call.get("step"), 0, call.get("size")))


def _sliced(call: Call, d: int) -> Halo | None:
    index = subscript_of(call)
    if index.tensors:
        return None
    for item in index.of("slice"):
        if item.dim == d:
            return Halo(index.places[d], sliding(item.step, -item.start, 1))
    return None


def pads_at(call: Call, d: int) -> tuple[int, int]:
    """Return how many elements a pad adds before and after dim ``d``.

    The argument ``pad`` has a pair for each dim, from the last dim on; other dims get (0, 0).
    """
    pad = call.get("pad")
    k = 2 * (call.operands[0].ndim - 1 - d)
    return (pad[k], pad[k + 1]) if k < len(pad) else (0, 0)


def pad_mode(call: Call) -> str:
    """Return the mode of a pad, "constant" if the op has none."""
    return call.get("mode", "constant") if "mode" in call.params else "constant"


def mirrored(mode: str, place: int, n: int) -> int:
    """Return the index in a dim of ``n`` items whose value a pad puts at position ``place``.

    Position -2 is index 0 with mode "replicate", and index 2 with mode "reflect". A position inside
    the dim is its own index.
    """
    if 0 <= place < n:
        return place
    if mode == "replicate":
        return 0 if place < 0 else n - 1
    return -place if place < 0 else 2 * (n - 1) - place


def _padded(call: Call, d: int) -> Halo | None:
    """Return the halo of a pad along dim ``d``.

    None if another mode than "constant" has a negative padding, which cuts elements off.
    """
    mode, n, (before, after) = pad_mode(call), call.operands[0].shape[d], pads_at(call, d)
    if mode == "constant":
        return Halo(d, lambda o, e: [(o - before, e - before)])
    if before < 0 or after < 0:  # torch also wraps and reflects elements that are cut off
        return None
    if mode == "circular":
        return Halo(d, lambda o, e: wrapped(o - before, e - before, n))

    def ranges(o: int, e: int) -> Ranges:
        taken = [mirrored(mode, place - before, n) for place in range(o, e)]
        return [(min(taken), max(taken) + 1)] if taken else []

    return Halo(d, ranges)


def shifts(call: Call) -> dict[int, int]:
    """Return {dim: shift} of a roll or fftshift; empty if it rolls the flattened tensor.

    ``roll(x, (1, 2), dims=(0, -1))`` of a matrix gives ``{0: 1, 1: 2}``.
    """
    if call.name in ("fft_fftshift", "fft_ifftshift"):
        back = call.name == "fft_ifftshift"
        return {d: (call.operands[0].shape[d] + back) // 2 for d in call.dims("dim")}
    given, by = call.get("dims"), call.get("shifts")
    if given is None or given == () or given == []:
        return {}
    dims, by = (v if isinstance(v, Sequence) else (v,) for v in (given, by))
    found: dict[int, int] = {}
    for d, shift in zip(dims, by, strict=True):
        d %= max(1, call.operands[0].ndim)
        found[d] = found.get(d, 0) + shift
    return found


def _rolled(call: Call, d: int) -> Halo | None:
    by, n = shifts(call), call.operands[0].shape[d]
    return Halo(d, lambda o, e: wrapped(o - by[d], e - by[d], n)) if d in by else None


def _flipped(call: Call, d: int) -> Halo | None:
    n = call.operands[0].shape[d]
    return Halo(d, lambda o, e: [(n - e, n - o)])


def _rotated(call: Call, d: int) -> Halo | None:
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


def _differenced(call: Call, d: int) -> Halo | None:
    order = call.get("n", 1)
    if d != call.dim("dim", -1) or len(call.operands) > 1 or order < 1:
        return None
    return Halo(d, lambda o, e: [(o, e + order)] if o < e else [])


def numbers(call: Call, name: str) -> tuple[int, ...]:
    """Return the ints in the argument ``name``, in each way in which torch takes them.

    ``x.repeat(2, 3)``, ``x.repeat([2, 3])`` and ``x.repeat(repeats=[2, 3])`` all give (2, 3).

    Raises:
        DoesNotFit: one of them is a tensor.
    """
    given = call.kwargs.get(name, call.args[1:])
    while isinstance(given, Sequence) and len(given) == 1 and isinstance(given[0], Sequence):
        given = given[0]
    found = (given,) if isinstance(given, int) else tuple(given)
    if not all(isinstance(n, int) for n in found):
        raise DoesNotFit(f"{name} holds tensors")
    return found


def repeats(call: Call) -> tuple[int, ...]:
    """Return how often repeat and tile repeat each dim of the result, including new dims in front.

    tile may name fewer dims than the tensor has: the others are repeated once.
    """
    times = numbers(call, "repeats" if call.name == "repeat" else "dims")
    return (1,) * (call.operands[0].ndim - len(times)) + times


def _repeated(call: Call, d: int) -> Halo | None:
    x, place = call.operands[0], len(repeats(call)) - call.operands[0].ndim + d
    return Halo(place, lambda o, e: wrapped(o, e, x.shape[d]))


def _in_place(call: Call, d: int) -> Halo | None:
    """Return the halo of repeat_interleave by a number ``times``: output k needs item k // times.

    None if the numbers are a tensor or the call gives ``output_size``.
    """
    times = call.get("repeats")
    if not isinstance(times, int) or times < 1 or call.get("output_size") is not None:
        return None
    if d != call.dim("dim", 0) or (call.get("dim") is None and call.operands[0].ndim != 1):
        return None
    return Halo(d, lambda o, e: [(o // times, (e - 1) // times + 1)] if o < e else [])


def _regrouped(call: Call, d: int) -> Halo | None:
    """Return the halo of view, reshape, ... along ``d``: the input items that contain the outputs.

    [5, 4] -> [20]: the outputs [7, 14) are in the rows [1, 4). None if ``d`` is not the first dim
    of a group of dims that are merged or divided (see ``view.heads``).
    """
    every = heads(call.operands[0].shape, call.outs[0].shape)
    found = [head[1:] for head in every if head[0] == d]
    if not found or not all(found[0][::2]):
        return None
    ((span, place, out_span),) = found
    # Whole items: the start rounds down, and the end rounds up.
    return Halo(place, lambda o, e: [(o * out_span // span, -(-e * out_span // span))])


_VIEWS = "_unsafe_view flatten ravel reshape unflatten view"

HALOS.update(
    {
        "constant_pad_nd": _padded, "diff": _differenced, "fft_fftshift": _rolled,
        "fft_ifftshift": _rolled, "flip": _flipped, "fliplr": _flipped, "flipud": _flipped,
        "getitem": _sliced, "narrow": _sliced, "narrow_copy": _sliced, "pad": _padded,
        "repeat": _repeated, "repeat_interleave": _in_place, "roll": _rolled,
        "rot90": _rotated, "slice": _sliced,
        "tile": _repeated,
        "unfold": _unfolded, **dict.fromkeys(_VIEWS.split(), _regrouped),
    }
)  # fmt: skip
