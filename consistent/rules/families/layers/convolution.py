"""Rules of convolution, pooling and resampling, where a split of the image needs its neighbours.

In the rules ``<xyz>`` are the pixels, of which a rank fetches what its outputs read. A convolution
is a matmul over channels at each pixel, so its rules are those of ``linear``. Ops that act
on each image separately split in batch and channels. Torch accepts an empty batch and refuses empty
channels, so channels are split only if every rank gets one.
"""

from __future__ import annotations

from typing import Any

from ....spec import P, S, Sbp, Split
from ... import notation
from ...halo.halo import with_halo
from ...signature import Call, LocalShapes, Operand, Signature
from ...table import Row, add_rows

_PIXELS, _TAPS = "xyz", "uvw"


def _without_empty_channels(
    call: Call, signatures: list[Signature], batched: bool
) -> list[Signature]:
    """Return ``signatures`` without those that could leave a rank without channels.

    A split batch may leave a rank without samples, which torch allows; ``batched`` says that dim 0
    is a batch. Other axes may split the channels too, so there must be one for every rank of the
    placement.
    """
    size = call.operands[0].spec.placement.size

    def fits(operand: Operand, entry: Sbp) -> bool:
        return not isinstance(entry, Split) or operand.shape[entry.dim] >= size

    return [
        s
        for s in signatures
        if (batched and s.outs[0] is S(0)) or all(map(fits, call.operands, s.ins))
    ]


def _with_argument(call: Call, name: str, value: Any) -> tuple[tuple, dict]:
    """Return the call's (args, kwargs) with the argument ``name`` set to ``value``.

    An argument that the call does not pass stays left out.
    """
    args, kwargs = list(call.args), dict(call.kwargs)
    position = call.params.index(name)
    if position < len(args):
        args[position] = value
    elif name in kwargs:
        kwargs[name] = value
    return tuple(args), kwargs


# -- convolution -----------------------------------------------------------------------------------


def convolution(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of a convolution: batch, channels or pixels may be split.

    A convolution is a matmul over channels at each pixel: ``nc[xy], oc[uv] + o -> no[xy]``
    with kernel elements uv, transposed ``nc[xy], co[uv] + o -> no[xy]``, and in groups ``ng[xy],
    g[iuv] + g -> ng[xy]``. Input and output channels may be split. Along split pixels, ranks fetch
    what their outputs read of neighbouring shards (a halo).
    """
    x, weight = call.get("input"), call.get("weight")
    tensors = [t for t in (x, weight, call.get("bias")) if isinstance(t, Operand)]
    if [t.index for t in tensors] != list(range(len(call.operands))):
        return [call.broadcast_signature()]
    pixels, taps = _PIXELS[: weight.ndim - 2], _TAPS[: weight.ndim - 2]
    batched = x.ndim == weight.ndim
    n = "n" if batched else ""
    if call.get("groups", 1) == 1:
        transposed = "transpose" in call.name or (
            "transposed" in call.params and call.get("transposed")
        )
        channels = "co" if transposed else "oc"
        rule = f"{n}c[{pixels}], {channels}[{taps}] + o -> {n}o[{pixels}]"
    else:
        rule = f"{n}g[{pixels}], g[i{taps}] + g -> {n}g[{pixels}]"
    signatures = notation.signatures_of_text(rule, call, parts)
    if call.get("groups", 1) != 1:
        if not _groups_align(call, x.shape[batched], call.outs[0].shape[batched]):
            signatures = [s for s in signatures if not isinstance(s.ins[1], Split)]
    planes = range(x.ndim - len(pixels), x.ndim)
    return _without_empty_channels(call, signatures, batched) + with_halo(call, parts, planes)


def _groups_align(call: Call, channels: int, out_channels: int) -> bool:
    """Return whether any split of the channels falls between groups, so that no group is divided.

    ``channels`` and ``out_channels`` are the numbers of channels of the input and of the output.
    """
    groups = call.get("groups", 1)
    return groups == channels == out_channels or groups % call.operands[0].spec.placement.size == 0


def with_local_groups(call: Call, ins: LocalShapes, outs: LocalShapes) -> tuple[tuple, dict]:
    """Return the call's arguments with the number of groups that this rank's shard has.

    With 8 groups and half of the channels, a rank has 4. ``ins`` are the shapes of the shards.
    """
    groups = call.get("groups", 1)
    if groups == 1:
        return call.args, dict(call.kwargs)
    x, weight = call.operands[0], call.operands[1]
    dim = x.ndim - weight.ndim + 1
    return _with_argument(call, "groups", groups * ins[0][dim] // x.shape[dim])


# -- images, each on its own ----------------------------------------------------------------------


def whole_channels(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of ops that move elements between channels and pixels.

    The batch may be split. P passes too, because elements are only moved. pixel_shuffle is such an
    op.
    """
    signatures = [call.broadcast_signature(), call.new_signature({0: P}, P)]
    x = call.operands[0]
    batch = x.ndim - 3
    # Never empty: torch cannot differentiate these ops for an empty batch.
    signatures += [
        call.new_signature({0: S(d)}, S(d))
        for d in range(batch)
        if x.shape[d] >= x.spec.placement.size
    ]
    return signatures


def pixel_shuffle(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of pixel_shuffle and its inverse: any dim may be split.

    Channels and pixels are split only if the placement's ranks divide them evenly, so that the
    channels that become one block of pixels stay together.
    """
    signatures, x, y = whole_channels(call, parts), call.operands[0], call.outs[0]
    for d in range(x.ndim - 3, x.ndim):
        if min(x.shape[d], y.shape[d]) % x.spec.placement.size == 0:
            signatures.append(call.new_signature({0: S(d)}, S(d)))
    return signatures


def im2col(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of im2col and col2im: batch, channels or image rows are split.

    Channels are split only if the ranks divide them evenly, since im2col stacks a block of each
    channel in one column. Along split rows, ranks fetch what they need of neighbouring rows (the
    form "halo").
    """
    x, y = call.operands[0], call.outs[0]
    signatures = [call.broadcast_signature(), call.new_signature({0: P}, P)]
    signatures += with_halo(call, parts, [x.ndim - (2 if call.name == "im2col" else 1)])
    batched = "n" if max(x.ndim, y.ndim) == 4 else ""
    if batched:
        signatures.append(call.new_signature({0: S(0)}, S(0)))
    dim = len(batched)
    if min(x.shape[dim], y.shape[dim]) % x.spec.placement.size == 0:
        signatures.append(call.new_signature({0: S(dim)}, S(dim)))
    return signatures


def with_local_batch_size(call: Call, ins: LocalShapes, outs: LocalShapes) -> tuple[tuple, dict]:
    """Return the arguments of affine_grid_generator with the shard's batch size in ``size``.

    ``ins`` are the shapes of the shards.
    """
    return _with_argument(call, "size", [ins[0][0], *call.get("size")[1:]])


# -- rows ------------------------------------------------------------------------------------------

_CONV = "input weight bias stride padding dilation groups"
_CONV_TRANSPOSE = "input weight bias stride padding output_padding groups dilation"
_ATEN_CONV = "input weight bias stride padding dilation transposed output_padding groups"

_POOL_1D = "input kernel_size stride padding ceil_mode count_include_pad"
_POOL = f"{_POOL_1D} divisor_override"
_MAX_POOL = "input kernel_size stride padding dilation ceil_mode return_indices"
_ADAPTIVE = "input output_size return_indices"
_NEAREST, _SMOOTH = "input size scales", "input size align_corners scales"

_SMOOTH_2D = "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa"
_SHARP_2D = "_upsample_nearest_exact2d upsample_nearest2d"
_TRANSPOSED = "conv_transpose1d conv_transpose2d conv_transpose3d"


def _image_rules(pixels: str, outs: str = "") -> tuple[str, ...]:
    """Return the rules of ops on separate images of dims ``pixels``, with and without a batch.

    ``_image_rules("<xy>")`` is ``("f(nc!<xy>) -> nc!<xy>", "f(c!<xy>) -> c!<xy>")``. ``!`` marks
    the channels, of which every rank must have at least one, as torch refuses images without them.
    """
    return tuple(f"f({dims}) -> {dims}{outs}" for dims in (f"nc!{pixels}", f"c!{pixels}"))


def _average_pool_rules(pixels: str) -> tuple[str, ...]:
    """Return the rules of average pooling: those of ``_image_rules`` without f, as it is linear.

    The flag "rounds" says that it is not linear for integers.
    """
    rules = _image_rules(f"<{pixels}>")
    return tuple(f"{rule.replace('f(', '').replace(')', '')}; rounds" for rule in rules)


def _max_unpool_rules(pixels: str) -> tuple[str, ...]:
    """Return the rules of max_unpool, with and without a batch: each image is on its own.

    ``_max_unpool_rules("xy")[0]`` is ``"nc![xy], f(nc![xy]) -> nc!_"`` for values and indices.
    """
    return tuple(f"{dims}[{pixels}], f({dims}[{pixels}]) -> {dims}_" for dims in ("nc!", "c!"))


_MEAN_1D, _MEAN_2D, _MEAN_3D = (
    _average_pool_rules("x"),
    _average_pool_rules("xy"),
    _average_pool_rules("xyz"),
)
_MAX_1D, _MAX_2D, _MAX_3D = (
    _image_rules("<x>", "*"),
    _image_rules("<xy>", "*"),
    _image_rules("<xyz>", "*"),
)

ROWS = (
    Row("_adaptive_avg_pool2d adaptive_avg_pool2d", _MEAN_2D, _ADAPTIVE),
    Row("_adaptive_avg_pool3d adaptive_avg_pool3d", _MEAN_3D, _ADAPTIVE),
    Row("_convolution convolution", convolution, _ATEN_CONV, localize=with_local_groups),
    Row(f"{_SMOOTH_2D} upsample_bicubic2d upsample_bilinear2d", _MEAN_2D, _SMOOTH, by_value=True),
    Row(_SHARP_2D, _MEAN_2D, _NEAREST, by_value=True),
    Row("_upsample_nearest_exact1d upsample_nearest1d", _MEAN_1D, _NEAREST, by_value=True),
    Row("_upsample_nearest_exact3d upsample_nearest3d", _MEAN_3D, _NEAREST, by_value=True),
    Row("adaptive_avg_pool1d", _MEAN_1D, _ADAPTIVE),
    Row("adaptive_max_pool1d", _MAX_1D, _ADAPTIVE, composite=True),
    Row("adaptive_max_pool2d", _MAX_2D, _ADAPTIVE, composite=True),
    Row("adaptive_max_pool3d", _MAX_3D, _ADAPTIVE, composite=True),
    Row(
        "affine_grid_generator",
        "n![ab] -> n!_",
        "theta size align_corners",
        localize=with_local_batch_size,
    ),
    Row("avg_pool1d", _MEAN_1D, _POOL_1D),
    Row("avg_pool2d", _MEAN_2D, _POOL),
    Row("avg_pool3d", _MEAN_3D, _POOL),
    Row("channel_shuffle native_channel_shuffle", "n[c]... -> n[c]..."),
    Row("col2im", im2col, "input output_size kernel_size dilation padding stride"),
    Row("conv1d conv2d conv3d", convolution, _CONV, localize=with_local_groups),
    Row("conv_tbc", "[t]bi, [k]io + o -> [s]bo", "input weight bias"),
    Row(_TRANSPOSED, convolution, _CONV_TRANSPOSE, localize=with_local_groups),
    Row(
        "grid_sampler grid_sampler_2d grid_sampler_3d",
        ("nc[xy], f(nuv[g]) -> ncuv", "nc[xyz], f(nuvw[g]) -> ncuvw"),
        "input grid",
    ),
    Row("im2col", im2col, "input kernel_size dilation padding stride"),
    Row("max_pool1d max_pool1d_with_indices", _MAX_1D, _MAX_POOL, composite=True),
    Row("max_pool2d max_pool2d_with_indices", _MAX_2D, _MAX_POOL, composite=True),
    Row("max_pool3d max_pool3d_with_indices", _MAX_3D, _MAX_POOL, composite=True),
    Row("max_unpool2d", _max_unpool_rules("xy"), "input indices", composite=True),
    Row("max_unpool3d", _max_unpool_rules("xyz"), "input indices", composite=True),
    Row("pixel_shuffle pixel_unshuffle", pixel_shuffle),
    Row("upsample_linear1d", _MEAN_1D, _SMOOTH, by_value=True),
    Row("upsample_trilinear3d", _MEAN_3D, _SMOOTH, by_value=True),
)

add_rows(ROWS)
