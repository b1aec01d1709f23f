"""Ops that move, repeat or drop elements by position.

They are linear, so P passes; a split stays where a dim stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..spec import EXTREMES, B, P, S
from .indexing import index_of
from .runs import pad_mode, repeats, shifts
from .signature import Call, Operand, RuleFunction, Signature
from .strides import along, rearranged
from .table import Row, add_rows
from .view import resized
from .window import windows


def numbers(call: Call, name: str) -> tuple[int, ...]:
    """The ints ``name``, given by keyword, as a list, or one by one after the tensor."""
    given = call.kwargs.get(name, call.args[1:])
    while isinstance(given, Sequence) and len(given) == 1 and isinstance(given[0], Sequence):
        given = given[0]
    found = (given,) if isinstance(given, int) else tuple(given)
    if not all(isinstance(n, int) for n in found):
        raise TypeError(f"{name} holds tensors")
    return found


def _except(call: Call, dims: Sequence[int]) -> list[Signature]:
    """Shapes of input and output agree, and all dims but ``dims`` may be split."""
    n = call.operands[0].ndim
    acted = {d % n for d in dims} if n else set()
    return call.same((d for d in range(n) if d not in acted), partial=True)


def rotated(call: Call, parts: int) -> list[Signature]:
    """rot90: the two dims change places, or are turned round."""
    dims = call.dims("dims", (0, 1))
    return _except(call, dims) + windows(call, parts, dims)


def flipped(call: Call, parts: int) -> list[Signature]:
    """flip: dims one by one or as a list. Along a split one a rank fetches what it shall hold."""
    dims = [d % max(1, call.operands[0].ndim) for d in numbers(call, "dims")]
    return _except(call, dims) + windows(call, parts, dims)


def rolled(call: Call, parts: int) -> list[Signature]:
    """roll: the same; without dims the flattened tensor is rolled."""
    dims = shifts(call)
    acted = dims or range(call.operands[0].ndim)
    return _except(call, list(acted)) + windows(call, parts, list(dims))


def flipped_along(d: int) -> RuleFunction:
    """fliplr, flipud: the dim is in the name."""
    return lambda call, parts: _except(call, (d,)) + windows(call, parts, (d,))


def unfolded(call: Call, parts: int) -> list[Signature]:
    """unfold: windows along a dim."""
    return along()(call, parts) + windows(call, parts, [call.dim("dim")])


def differenced(call: Call, parts: int) -> list[Signature]:
    """diff: each item less the one before; what stands in front or behind is split alike."""
    dim, every = call.dim("dim", -1), range(len(call.operands))
    made = [call.whole(), call.make(dict.fromkeys(every, P), P)]
    free = [d for d in range(call.operands[0].ndim) if d != dim]
    made += [call.make(dict.fromkeys(every, S(d)), S(d)) for d in free]
    return made + windows(call, parts, [dim])


def expanded_as(call: Call, parts: int) -> list[Signature]:
    """The second operand gives its shape, and no value."""
    x, other = call.operands
    made = [call.whole(), call.make({0: P}, P), call.make({1: P}, B), call.make({0: P, 1: P}, P)]
    for place in range(other.ndim):
        d = place - other.ndim + x.ndim
        kept = d >= 0 and x.shape[d] == other.shape[place]
        made.append(call.make({0: S(d), 1: S(place)} if kept else {1: S(place)}, S(place)))
    return made


def expanded_together(call: Call, parts: int) -> list[Signature]:
    """broadcast_tensors: every output has the common shape."""
    out = call.outs[0].shape
    made = [call.whole(), call.make({i: P for i in range(len(call.operands))}, P)]
    for place in range(len(out)):
        ins = {}
        for operand in call.operands:
            d = place - len(out) + operand.ndim
            if d >= 0 and operand.shape[d] == out[place]:
                ins[operand.index] = S(d)
        if ins:
            made.append(call.make(ins, S(place)))
    return made


def repeated(call: Call, parts: int) -> list[Signature]:
    """repeat and tile: a dim repeated once stays; of another a rank fetches what it shall hold."""
    (x,), times = call.operands, repeats(call)
    extra = len(times) - x.ndim
    once = [d for d in range(x.ndim) if times[d + extra] == 1]
    made = [call.whole(), call.make({0: P}, P)]
    made += [call.make({0: S(d)}, S(d + extra)) for d in once]
    return made + windows(call, parts, [d for d in range(x.ndim) if d not in once])


def squeezed(call: Call, parts: int) -> list[Signature]:
    """Dims of size 1 go. A piece of size 1 of a larger dim must not: the form says which go."""
    (x,) = call.operands
    dim = call.get("dim")
    asked = (
        range(x.ndim)
        if dim is None
        else [d % x.ndim for d in ((dim,) if isinstance(dim, int) else dim)]
    )
    gone = [d for d in asked if x.shape[d] == 1]
    made = [call.whole(), call.make({0: P}, P)]
    for d in range(x.ndim):
        if d not in gone:
            place = d - sum(g < d for g in gone)
            made.append(call.make({0: S(d)}, S(place), form="squeeze" if d in asked else None))
    return made


def triangle(call: Call, parts: int) -> list[Signature]:
    """tril and triu: in the matrix dims the diagonal moves with the shard."""
    n = call.operands[0].ndim
    made = call.same(range(n - 2), partial=True)
    return made + [call.make({0: S(d)}, S(d), form="triangle") for d in (n - 2, n - 1)]


def padded(call: Call, parts: int) -> list[Signature]:
    """Unpadded dims stay. A constant would be added once per rank, unless it is 0."""
    (x,) = call.operands
    pad, value = call.get("pad"), call.get("value")
    mode, dims = pad_mode(call), range(x.ndim)
    kept = [d for d in dims if not any(pad[2 * (x.ndim - 1 - d) :][:2])]
    acted = [d for d in dims if d not in kept]
    if mode != "constant":  # torch takes an empty batch, and wants all else not to be empty
        batch = x.ndim == len(pad) // 2 + 2
        kept = [d for d in kept if (batch and d == 0) or x.shape[d] >= x.spec.placement.size]
    zero = value is None or value == 0
    made = call.same(kept) + windows(call, parts, acted)
    return made + [call.make({0: P}, P)] if zero or mode != "constant" else made


def diagonals(call: Call, parts: int) -> list[Signature]:
    """diag_embed: the last dim becomes two, others keep their order around them."""
    (x,) = call.operands
    n = x.ndim + 1
    new = {call.dim("dim1", -2, ndim=n), call.dim("dim2", -1, ndim=n)}
    left = [d for d in range(n) if d not in new]
    made = [call.whole(), call.make({0: P}, P)]
    return made + [call.make({0: S(d)}, S(place)) for d, place in enumerate(left)]


def linear_whole(call: Call, parts: int) -> list[Signature]:
    """Whole or P."""
    return [call.whole(), call.make({0: P}, P)]


def grid(call: Call, parts: int) -> list[Signature]:
    """meshgrid: each vector is a dim of every output."""
    count = len(call.operands)
    order = list(range(count))
    if call.kwargs.get("indexing", "ij") == "xy" and count > 1:
        order[:2] = [1, 0]
    made = [call.whole(), call.make({i: P for i in range(count)}, P)]
    vectors = [x.index for x in call.operands if x.ndim == 1]
    # Each output by its own vector: another axis would split all outputs by one of them.
    if len(vectors) == count > 1 and call.operands[0].spec.placement.ndim == 1:
        outs = [S(order[i]) for i in range(count)]
        made.append(call.make(dict.fromkeys(range(count), S(0)), outs, "meshgrid"))
    return made + [call.make({i: S(0)}, S(order[i])) for i in vectors]


def overwritten(call: Call, parts: int) -> list[Signature]:
    """select_scatter and its kin: both operands split along a dim that the view keeps."""
    x, source = call.operands
    view = Call(
        call.name.removesuffix("_scatter"), *_without(call, source), (x,), params=call.params
    )
    acted = [call.dim("dim", 0)] if "dim" in call.params else []
    made = [call.whole(), call.make({0: P, 1: P}, P)]
    for d in acted:  # each rank writes what lies in its shard
        if any(item.dim == d for item in index_of(call).of("all")):
            made.append(call.make({0: S(d), 1: S(d)}, S(d)))
        else:
            made.append(call.make({0: S(d)}, S(d), "write_window"))
    for signature in rearranged(view, parts):
        entry = signature.ins[0]
        if entry.is_split and entry.dim not in acted:  # type: ignore[attr-defined]
            made.append(call.make({0: entry, 1: signature.outs[0]}, entry))
    return made


def _without(call: Call, source: Operand) -> tuple[tuple, dict]:
    args = tuple(a for a in call.args if a is not source)
    return args, {k: v for k, v in call.kwargs.items() if v is not source}


def new(call: Call, parts: int) -> list[Signature]:
    """x.new_zeros(sizes) and its kin: x gives a device and a dtype, and is not moved."""
    made = [call.whole(), *(call.make({0: p}, B) for p in (P, *EXTREMES))]
    return made + [call.make({0: S(d)}, B) for d in range(call.operands[0].ndim)]


ROWS = (
    Row(
        "adjoint atleast_1d atleast_2d atleast_3d diagonal moveaxis movedim permute",
        rearranged, moves=True,
    ),
    Row("broadcast_tensors", expanded_together, moves=True),
    Row("broadcast_to expand", rearranged, localize=resized, moves=True),
    Row("constant_pad_nd", padded, "input pad value", by_value=True),
    Row("diag diagflat", linear_whole),
    Row("diag_embed", diagonals, "input offset dim1 dim2"),
    Row("diagonal_scatter", overwritten),
    Row("diff", differenced, "input n dim prepend append"),
    Row("expand_as", expanded_as, moves=True),
    Row("flip", flipped, moves=True),
    Row("fliplr", flipped_along(1)),
    Row("flipud", flipped_along(0)),
    # Opened, torch.meshgrid would meet itself: its body asks for hooks in a helper.
    Row("meshgrid", grid, composite=True),
    Row("new_empty new_empty_strided new_full new_ones new_tensor new_zeros", new),
    Row("pad", padded, "input pad mode value", by_value=True),
    Row("repeat tile", repeated, moves=True),
    Row("roll", rolled, "input shifts dims", moves=True),
    Row("rot90", rotated, "input k dims"),
    Row("select_scatter", overwritten, "input src dim index"),
    Row("slice_scatter", overwritten, "input src dim start end step"),
    Row("squeeze", squeezed, "input dim", moves=True),
    Row("swapaxes swapdims t transpose unsqueeze", rearranged, moves=True),
    Row("tril triu", triangle, "input diagonal"),
    Row("unbind", along(0), "input dim", moves=True),
    Row("unfold", unfolded, "input dim size step"),
)  # fmt: skip

add_rows(ROWS)
