"""About 200 op calls that models use most, each with the ways that its mathematics allows
(least.py).

Chosen from: the calls that Llama, GPT-2, BERT, ViT and T5 make (tests/models/zoo.py, traced by a
TorchFunctionMode: linear, view, add, mul, transpose, contiguous, dropout, getitem, reshape, cat,
pow, mean, rsqrt, layer_norm, scaled_dot_product_attention, embedding, unsqueeze, addmm, neg,
cross_entropy, gelu, expand, div, where, relu, silu, pad, split, tanh, permute, setitem, gather,
conv2d, flatten, masked_fill, ...); what residual and U-shaped convolutional networks and detection
heads add (conv, pool, batch norm, interpolate, topk, sort, gather, scatter, masks); the layers and
losses of the torch.nn page; and the tensor functions of training loops (norms, clamps, argmax,
accuracy, statistics).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.least import (
    Ways,
    along,
    any_of,
    first,
    letters,
    moved,
    pointwise,
    reduction,
    rows_sent,
    ways_of,
)

Shape = tuple[int, ...]
Input = Shape | tuple[str, int, Shape] | tuple[str, Shape]


@dataclass(frozen=True)
class OpCall:
    """A call on the tensors that ``inputs`` describe: a shape (float32), ("int", high, shape) or
    ("bool", shape)."""

    name: str
    call: Callable[..., Any]
    inputs: tuple[Input, ...]
    ways: Ways


X = (16, 64, 256)  # batch, length, features
M = (256, 512)
IMAGE = (8, 16, 32, 32)
CALLS: list[OpCall] = []


def add(name: str, call: Callable[..., Any], inputs: tuple[Input, ...], ways: Ways) -> None:
    """Register a call."""
    CALLS.append(OpCall(name, call, inputs, ways))


# -- element by element: no bytes in any layout ----------------------------------------------------

for name in (
    "abs ceil cos erf exp floor log1p logical_not neg reciprocal relu round rsqrt sigmoid sign sin "
    "sqrt square tanh isnan isfinite"
).split():
    add(name, getattr(torch, name), (X,), pointwise)
for name in (
    "elu celu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu "
    "softplus softsign"
).split():
    add(f"F.{name}", getattr(F, name), (X,), pointwise)
for name in "add sub mul div maximum minimum eq gt lt ge atan2".split():
    add(name, getattr(torch, name), (X, X), pointwise)
    add(f"{name} a row", getattr(torch, name), (X, (256,)), pointwise)
add("add a column", torch.add, (X, (64, 1)), pointwise)
add("add number", lambda x: x + 2.0, (X,), pointwise)
add("mul number", lambda x: x * 2.0, (X,), pointwise)
add("number - x", lambda x: 1.0 - x, (X,), pointwise)
add("pow 2", lambda x: x**2, (X,), pointwise)
add("clamp", lambda x: x.clamp(-1, 1), (X,), pointwise)
add("masked_fill", lambda x, m: x.masked_fill(m, 0.0), (X, ("bool", X)), pointwise)
add("where", lambda x, m, y: torch.where(m, x, y), (X, ("bool", X), X), pointwise)
add("lerp", lambda x, y: torch.lerp(x, y, 0.3), (X, X), pointwise)
add("addcmul", torch.addcmul, (X, X, X), pointwise)
add("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z + 9), (X, X, X), pointwise)
add("to bfloat16", lambda x: x.to(torch.bfloat16), (X,), pointwise)
add("to int", lambda x: x.long(), (X,), pointwise)
add("clone", torch.clone, (X,), pointwise)
add("contiguous", lambda x: x.contiguous(), (X,), pointwise)
add("zeros_like", torch.zeros_like, (X,), pointwise)
add("full_like", lambda x: torch.full_like(x, 3.0), (X,), pointwise)
add("add_", lambda x, y: x.clone().add_(y), (X, X), pointwise)
add("mul_", lambda x: x.clone().mul_(0.9), (X,), pointwise)
add("copy_", lambda x, y: x.clone().copy_(y), (X, X), pointwise)
add(
    "prelu",
    F.prelu,
    (IMAGE, (16,)),
    any_of(ways_of(((0, None), 0), ((1, 0), 1), ((2, None), 2), ((3, None), 3))),
)
add("F.dropout", lambda x: F.dropout(x, 0.0), (X,), pointwise)
add("F.glu", lambda x: F.glu(x, -1), (X,), first({0: 0, 1: 1}))
add("outer", torch.outer, ((512,), (384,)), letters("i,j->ij"))
add("logical_and", torch.logical_and, (("bool", X), ("bool", X)), pointwise)

# -- products: letters -----------------------------------------------------------------------------

add("matmul 2d", torch.matmul, ((128, 512), (512, 1024)), letters("mk,kn->mn"))
add("matmul 3d 2d", torch.matmul, (X, (256, 384)), letters("abk,kn->abn"))
add("matmul 4d", torch.matmul, ((4, 8, 64, 32), (4, 8, 32, 64)), letters("abmk,abkn->abmn"))
add("mm", torch.mm, ((128, 512), (512, 1024)), letters("mk,kn->mn"))
add("bmm", torch.bmm, ((16, 64, 96), (16, 96, 64)), letters("bmk,bkn->bmn"))
add("mv", torch.mv, (M, (512,)), letters("mk,k->m"))
add("dot", torch.dot, ((4096,), (4096,)), letters("k,k->"))
add("F.linear", F.linear, (X, (384, 256)), letters("abi,oi->abo"))
add(
    "F.linear bias",
    F.linear,
    (X, (384, 256), (384,)),
    any_of(
        ways_of(((0, None, None), 0), ((1, None, None), 1), ((None, 0, 0), 2), ((2, 1, "P"), "P"))
    ),
)
add(
    "addmm",
    torch.addmm,
    ((384,), M, (512, 384)),
    ways_of(((0, None, 1), 1), ((None, 0, None), 0), (("P", 1, 0), "P")),
)
add(
    "baddbmm",
    torch.baddbmm,
    ((16, 64, 64), (16, 64, 96), (16, 96, 64)),
    ways_of(((0, 0, 0), 0), ((1, 1, None), 1), ((2, None, 2), 2), (("P", 2, 1), "P")),
)
add(
    "einsum attention",
    lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k),
    ((4, 8, 64, 32), (4, 8, 64, 32)),
    letters("bhid,bhjd->bhij"),
)
add(
    "einsum experts",
    lambda x, w: torch.einsum("bld,edf->blef", x, w),
    ((8, 32, 64), (4, 64, 48)),
    letters("bld,edf->blef"),
)
add("F.bilinear", F.bilinear, ((64, 32), (64, 24), (16, 32, 24)), letters("ni,nj,oij->no"))
add("tensordot", lambda a, b: torch.tensordot(a, b, 1), (X, (256, 128)), letters("abk,kn->abn"))

# -- reductions ------------------------------------------------------------------------------------

for dim in (-1, 0, 1):
    add(f"sum {dim}", lambda x, d=dim: x.sum(d), (X,), reduction(dim))
    add(f"mean {dim}", lambda x, d=dim: x.mean(d), (X,), reduction(dim))
    add(f"amax {dim}", lambda x, d=dim: x.amax(d), (X,), reduction(dim, linear=False))
    # A maximum and its index: 4 and 8 bytes; counted in results of the first output's size.
    add(f"max {dim}", lambda x, d=dim: x.max(d), (X,), reduction(dim, linear=False, numbers=3))
    # The maximum is sent with the index: 12 bytes for each int64 of the result.
    add(
        f"argmax {dim}",
        lambda x, d=dim: x.argmax(d),
        (X,),
        reduction(dim, linear=False, numbers=1.5),
    )
add("mean keepdim", lambda x: x.mean(-1, keepdim=True), (X,), reduction(-1, keep=True))
add("sum all", torch.sum, (X,), reduction())
add("mean all", torch.mean, (X,), reduction())
add("max all", torch.max, (X,), reduction(linear=False))
add("min -1", lambda x: x.amin(-1), (X,), reduction(-1, linear=False))
add("sum 2 dims", lambda x: x.sum((0, 1)), (X,), reduction(0, 1))
add("var -1", lambda x: x.var(-1), (X,), reduction(-1, linear=False, numbers=2))
add("std all", torch.std, (X,), reduction(linear=False, numbers=2))
add("norm all", lambda x: x.norm(), (X,), reduction(linear=False))
add(
    "linalg.vector_norm -1",
    lambda x: torch.linalg.vector_norm(x, dim=-1),
    (X,),
    reduction(-1, linear=False),
)
add("prod -1", lambda x: x.prod(-1), (X,), reduction(-1, linear=False))
add("any all", torch.any, (("bool", X),), reduction(linear=False))
add("all -1", lambda x: x.all(-1), (("bool", X),), reduction(-1, linear=False))
add("count_nonzero", lambda x: x.count_nonzero(), (X,), reduction())
add("logsumexp -1", lambda x: x.logsumexp(-1), (X,), reduction(-1, linear=False))
add("median -1", lambda x: x.median(-1)[0], (X,), first({0: 0, 1: 1}))

# -- rows that belong together ---------------------------------------------------------------------

for dim in (-1, 1):
    add(f"softmax {dim}", lambda x, d=dim: x.softmax(d), (X,), along(dim, numbers=1))
    add(f"log_softmax {dim}", lambda x, d=dim: x.log_softmax(d), (X,), along(dim, numbers=1))
    add(f"cumsum {dim}", lambda x, d=dim: x.cumsum(d), (X,), along(dim, per=rows_sent(dim, 1)))
    add(f"sort {dim}", lambda x, d=dim: x.sort(d)[0], (X,), along(dim))
    add(
        f"flip {dim}", lambda x, d=dim: x.flip(d), (X,), along(dim, per=rows_sent(dim, X[dim] // 2))
    )
    add(f"roll {dim}", lambda x, d=dim: x.roll(3, d), (X,), along(dim, per=rows_sent(dim, 3)))
    add(f"F.normalize {dim}", lambda x, d=dim: F.normalize(x, dim=d), (X,), along(dim, numbers=1))
add("argsort", lambda x: x.argsort(-1), (X,), along(-1))
add("cumprod -1", lambda x: x.cumprod(-1), (X,), along(-1, per=rows_sent(-1, 1)))
# k values and indices of every row are sent, and each rank ends with half of the rows.
add(
    "topk 8",
    lambda x: x.topk(8, -1)[0],
    (X,),
    ways_of(((0,), 0), ((1,), 1), ((2,), 0, lambda c: c.scattered(3 * c.out_bytes))),
)
add("diff", lambda x: x.diff(dim=1), (X,), along(1, per=rows_sent(1, 1)))
add("tril", torch.tril, (X,), pointwise)
add("triu", torch.triu, (X,), pointwise)

# -- normalization ---------------------------------------------------------------------------------

add(
    "F.layer_norm",
    lambda x, w, b: F.layer_norm(x, (256,), w, b),
    (X, (256,), (256,)),
    along(-1, numbers=2),
)
add("F.layer_norm plain", lambda x: F.layer_norm(x, (256,)), (X,), along(-1, numbers=2))
add("F.rms_norm", lambda x, w: F.rms_norm(x, (256,), w), (X, (256,)), along(-1, numbers=1))


def _stats(count: int) -> Callable[[Any], float]:
    """A mean and a variance for each of ``count`` groups on every rank."""
    return lambda case: case.everywhere(2 * 4 * count)


add(
    "F.batch_norm train",
    lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    (IMAGE, (16,), (16,)),
    ways_of(
        ((0, None, None), 0, _stats(16)),
        ((1, 0, 0), 1),
        ((2, None, None), 2, _stats(16)),
        ((3, None, None), 3, _stats(16)),
    ),
)
add(
    "F.batch_norm eval",
    lambda x, m, v: F.batch_norm(x, m, v * v + 1),
    (IMAGE, (16,), (16,)),
    ways_of(((0, None, None), 0), ((1, 0, 0), 1), ((2, None, None), 2), ((3, None, None), 3)),
)
add(
    "F.group_norm",
    lambda x, w, b: F.group_norm(x, 4, w, b),
    (IMAGE, (16,), (16,)),
    ways_of(
        ((0, None, None), 0),
        ((1, 0, 0), 1),
        ((2, None, None), 2, _stats(32)),
        ((3, None, None), 3, _stats(32)),
    ),
)
add(
    "F.instance_norm",
    lambda x: F.instance_norm(x),
    (IMAGE,),
    ways_of(((0,), 0), ((1,), 1), ((2,), 2, _stats(128)), ((3,), 3, _stats(128))),
)

# -- shapes ----------------------------------------------------------------------------------------

add("transpose", lambda x: x.transpose(1, 2), (X,), moved({0: 0, 1: 2, 2: 1}))
add("t", torch.t, (M,), moved({0: 1, 1: 0}))
add("permute", lambda x: x.permute(2, 0, 1), (X,), moved({0: 1, 1: 2, 2: 0}))
add("movedim", lambda x: x.movedim(0, -1), (X,), moved({0: 2, 1: 0, 2: 1}))
add("view heads", lambda x: x.view(16, 64, 8, 32), (X,), moved({0: 0, 1: 1, 2: 2}))
add("view merge front", lambda x: x.view(-1, 256), (X,), moved({0: 0, 1: 0, 2: 1}))
add("reshape merge back", lambda x: x.reshape(16, -1), (X,), moved({0: 0, 1: 1, 2: 1}))
add("flatten", lambda x: x.flatten(1), (IMAGE,), moved({0: 0, 1: 1, 2: 1, 3: 1}))
add("unflatten", lambda x: x.unflatten(-1, (8, 32)), (X,), moved({0: 0, 1: 1, 2: 2}))
add("unsqueeze", lambda x: x.unsqueeze(1), (X,), moved({0: 0, 1: 2, 2: 3}))
add("squeeze", lambda x: x.squeeze(1), ((16, 1, 256),), moved({0: 0, 2: 1}))
add("expand", lambda x: x.expand(16, 64, 256), ((16, 1, 256),), moved({0: 0, 2: 2}))
add("repeat batch", lambda x: x.repeat(1, 2, 1), (X,), moved({0: 0, 2: 2}))
add("repeat_interleave", lambda x: x.repeat_interleave(2, 1), (X,), moved({0: 0, 1: 1, 2: 2}))
add("chunk last", lambda x: x.chunk(2, -1)[0], (X,), moved({0: 0, 1: 1}))
add("split length", lambda x: x.split(32, 1)[0], (X,), moved({0: 0, 2: 2}))
add("unbind", lambda x: x.unbind(1)[0], ((16, 4, 256),), moved({0: 0, 2: 1}))
add("unfold", lambda x: x.unfold(1, 4, 4), (X,), moved({0: 0, 1: 1, 2: 2}))
add("stack", lambda x, y: torch.stack((x, y), 1), (X, X), moved({0: 0, 1: 2, 2: 3}))
for dim in (0, -1):
    add(
        f"cat {dim}",
        lambda x, y, d=dim: torch.cat((x, y), d),
        (X, X),
        moved({d: d for d in range(3) if d != dim % 3}),
    )
# One more on either side: the border between two pieces stays where it is.
add("F.pad last", lambda x: F.pad(x, (1, 1)), (X,), pointwise)
add("F.pad image", lambda x: F.pad(x, (1, 1, 1, 1)), (IMAGE,), pointwise)
add("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (IMAGE,), moved({0: 0, 1: 1, 2: 2, 3: 3}))
add(
    "meshgrid",
    lambda x, y: torch.meshgrid(x, y, indexing="ij")[0],
    ((256,), (128,)),
    ways_of(((0, None), 0), ((None, 0), 1), ((0, 0), 0)),
)
add("diagonal", lambda x: x.diagonal(), ((256, 256),), first({0: "P", 1: "P"}))
add(
    "broadcast_to",
    lambda x: torch.broadcast_to(x, (16, 64, 256)),
    ((64, 256),),
    moved({0: 1, 1: 2}),
)

# -- indexing --------------------------------------------------------------------------------------


def _of_out(part: float) -> Callable[[Any], float]:
    """``part`` of the result is computed on one rank and belongs to another."""
    return lambda case: part * case.out_bytes


add("x[:, 0]", lambda x: x[:, 0], (X,), first({0: 0, 1: 0, 2: 1}, {1: _of_out(0.5)}))
add("x[:, -1]", lambda x: x[:, -1], (X,), first({0: 0, 1: 0, 2: 1}, {1: _of_out(0.5)}))
add("x[:, :32]", lambda x: x[:, :32], (X,), first({0: 0, 1: 1, 2: 2}, {1: _of_out(0.5)}))
add("x[:, 1:]", lambda x: x[:, 1:], (X,), first({0: 0, 1: 1, 2: 2}, {1: rows_sent(1, 1)}))
add("x[:, :-1]", lambda x: x[:, :-1], (X,), first({0: 0, 1: 1, 2: 2}))
add("x[..., ::2]", lambda x: x[..., ::2], (X,), first({0: 0, 1: 1, 2: 2}))
add("x[None]", lambda x: x[None], (X,), first({0: 1, 1: 2, 2: 3}))
add("x[3]", lambda x: x[3], (X,), first({0: 0, 1: 0, 2: 1}, {0: _of_out(0.5)}))
add("narrow", lambda x: x.narrow(2, 0, 128), (X,), first({0: 0, 1: 1, 2: 2}, {2: _of_out(0.5)}))
add(
    "x[index]",
    lambda x, i: x[i],
    (X, ("int", 16, (8,))),
    ways_of(((None, 0), 0), ((1, None), 1), ((2, None), 2), ((0, None), "P")),
)
add(
    "index_select 1",
    lambda x, i: x.index_select(1, i),
    (X, ("int", 64, (16,))),
    ways_of(((None, 0), 1), ((0, None), 0), ((2, None), 2), ((1, None), "P")),
)
add(
    "gather -1",
    lambda x, i: x.gather(-1, i),
    (X, ("int", 256, (16, 64, 8))),
    ways_of(((0, 0), 0), ((1, 1), 1), ((2, None), "P"), ((None, 2), 2)),
)
add(
    "take_along_dim",
    lambda x, i: torch.take_along_dim(x, i, 1),
    (X, ("int", 64, (16, 8, 256))),
    ways_of(((0, 0), 0), ((2, 2), 2), ((1, None), "P"), ((None, 1), 1)),
)
add(
    "scatter_add -1",
    lambda x, i, s: x.scatter_add(-1, i, s),
    (X, ("int", 256, (16, 64, 8)), (16, 64, 8)),
    ways_of(((0, 0, 0), 0), ((1, 1, 1), 1), ((2, None, None), 2)),
)
add(
    "scatter -1",
    lambda x, i: x.scatter(-1, i, 1.0),
    (X, ("int", 256, (16, 64, 8))),
    ways_of(((0, 0), 0), ((1, 1), 1), ((2, None), 2)),
)
add(
    "index_add 0",
    lambda x, i, s: x.index_add(0, i, s),
    (M, ("int", 256, (64,)), (64, 512)),
    ways_of(((0, None, None), 0), ((1, None, 1), 1), (("P", 0, 0), "P")),
)
add(
    "index_copy 0",
    lambda x, i, s: x.index_copy(0, i, s),
    (M, ("int", 256, (1,)), (1, 512)),
    ways_of(((0, None, None), 0), ((1, None, 1), 1)),
)


def _set(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, :8] = 0.0
    return x


def _set_row(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, 5] = y
    return x


add("x[:, :8] = 0", _set, (X,), pointwise)
add("x[:, 5] = y", _set_row, (X, (16, 256)), ways_of(((0, 0), 0), ((1, None), 1), ((2, 1), 2)))
add(
    "F.embedding",
    lambda w, i: F.embedding(i, w),
    ((8192, 256), ("int", 8192, (16, 64))),
    ways_of(((0, None), "P"), ((1, None), 2), ((None, 0), 0), ((None, 1), 1)),
)
add(
    "F.embedding tokens",
    lambda i, w: F.embedding(i, w),
    (("int", 8192, (16, 64)), (8192, 256)),
    ways_of(((None, 0), "P"), ((None, 1), 2), ((0, None), 0), ((1, None), 1)),
)
add("F.one_hot", lambda i: F.one_hot(i, 32), (("int", 32, (16, 64)),), first({0: 0, 1: 1}))
add("masked_select sum", lambda x: (x * (x > 0)).sum(), (X,), reduction())

# -- losses ----------------------------------------------------------------------------------------

for name in "mse_loss l1_loss smooth_l1_loss huber_loss".split():
    add(f"F.{name}", getattr(F, name), (X, X), any_of(moved({0: "P", 1: "P", 2: "P"})))
add(
    "F.bce_with_logits", F.binary_cross_entropy_with_logits, (X, X), moved({0: "P", 1: "P", 2: "P"})
)
add(
    "F.bce",
    lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    (X, X),
    moved({0: "P", 1: "P", 2: "P"}),
)
add(
    "F.kl_div",
    lambda x, y: F.kl_div(x, y, reduction="batchmean", log_target=True),
    (X, X),
    moved({0: "P", 1: "P", 2: "P"}),
)


def _class_split(case: Any) -> float:
    """The logsumexp of half of the rows."""
    return case.scattered(case.shapes[0][0] * 4)


add(
    "F.cross_entropy",
    F.cross_entropy,
    ((1024, 512), ("int", 512, (1024,))),
    ways_of(((0, 0), "P"), ((1, None), "P", _class_split)),
)
add(
    "F.cross_entropy sum",
    lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    ((1024, 512), ("int", 512, (1024,))),
    ways_of(((0, 0), "P"), ((1, None), "P", _class_split)),
)
add(
    "F.cross_entropy none",
    lambda x, t: F.cross_entropy(x, t, reduction="none"),
    ((1024, 512), ("int", 512, (1024,))),
    ways_of(((0, 0), 0), ((1, None), "P", _class_split)),
)
add(
    "F.nll_loss",
    F.nll_loss,
    ((1024, 512), ("int", 512, (1024,))),
    ways_of(((0, 0), "P"), ((1, None), "P")),
)
add(
    "F.cosine_similarity",
    lambda x, y: F.cosine_similarity(x, y, -1),
    (X, X),
    any_of(moved({0: 0, 1: 1}), ways_of(((2, 2), None, lambda c: c.scattered(3 * c.out_bytes)))),
)

# -- images ----------------------------------------------------------------------------------------


def _conv(halo: int) -> Ways:
    """Images, out channels, in channels; space with a halo of ``halo`` rows from the neighbour."""
    return ways_of(
        ((0, None), 0),
        ((None, 0), 1),
        ((1, 1), "P"),
        ((2, None), 2, rows_sent(2, halo)),
        ((3, None), 3, rows_sent(3, halo)),
    )


def _pool(halo: int) -> Ways:
    return first({0: 0, 1: 1, 2: 2, 3: 3}, {2: rows_sent(2, halo), 3: rows_sent(3, halo)})


add("F.conv2d 3x3", lambda x, w: F.conv2d(x, w, padding=1), (IMAGE, (16, 16, 3, 3)), _conv(1))
add("F.conv2d 1x1", lambda x, w: F.conv2d(x, w), (IMAGE, (32, 16, 1, 1)), _conv(0))
add("F.conv2d patches", lambda x, w: F.conv2d(x, w, stride=4), (IMAGE, (32, 16, 4, 4)), _conv(0))
add(
    "F.conv2d stride 2",
    lambda x, w: F.conv2d(x, w, stride=2, padding=1),
    (IMAGE, (32, 16, 3, 3)),
    _conv(1),
)
add(
    "F.conv2d depthwise",
    lambda x, w: F.conv2d(x, w, padding=1, groups=16),
    (IMAGE, (16, 1, 3, 3)),
    ways_of(
        ((0, None), 0),
        ((1, 0), 1),
        ((2, None), 2, rows_sent(2, 1)),
        ((3, None), 3, rows_sent(3, 1)),
    ),
)
add(
    "F.conv1d",
    lambda x, w: F.conv1d(x, w, padding=1),
    ((8, 64, 256), (32, 64, 3)),
    ways_of(((0, None), 0), ((None, 0), 1), ((1, 1), "P"), ((2, None), 2, rows_sent(2, 1))),
)
add(
    "F.conv_transpose2d",
    lambda x, w: F.conv_transpose2d(x, w, stride=2),
    (IMAGE, (16, 8, 2, 2)),
    ways_of(((0, None), 0), ((None, 1), 1), ((1, 0), "P"), ((2, None), 2), ((3, None), 3)),
)
add("F.max_pool2d", lambda x: F.max_pool2d(x, 2), (IMAGE,), _pool(0))
add("F.max_pool2d overlap", lambda x: F.max_pool2d(x, 3, 2, 1), (IMAGE,), _pool(1))
add("F.avg_pool2d", lambda x: F.avg_pool2d(x, 2), (IMAGE,), _pool(0))
add(
    "F.adaptive_avg_pool2d 1",
    lambda x: F.adaptive_avg_pool2d(x, 1),
    (IMAGE,),
    first({0: 0, 1: 1, 2: "P", 3: "P"}),
)
add("F.interpolate nearest", lambda x: F.interpolate(x, scale_factor=2), (IMAGE,), _pool(0))
add(
    "F.interpolate bilinear",
    lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    (IMAGE,),
    _pool(1),
)
add("F.unfold", lambda x: F.unfold(x, 4, stride=4), (IMAGE,), first({0: 0, 1: 1, 2: 2}))

# -- attention -------------------------------------------------------------------------------------

HEADS = (4, 8, 64, 32)


def _exchange_kv(case: Any) -> float:
    """Every rank's queries need all keys and values, half of which are elsewhere."""
    return 2 * 4 * 4 * 8 * 64 * 32 * (case.n - 1) / case.n


def _merge(case: Any) -> float:
    """Each rank has attended to its keys; a result and a logsumexp of every row are combined."""
    return case.scattered(case.out_bytes * 33 / 32)


_ATTENTION = ways_of(
    ((0, 0, 0), 0),
    ((1, 1, 1), 1),
    ((2, None, None), 2),
    ((None, None, 3), 3),
    ((None, 2, 2), None, _merge),
    ((2, 2, 2), 2, _exchange_kv),
)
add("F.sdpa", F.scaled_dot_product_attention, (HEADS, HEADS, HEADS), _ATTENTION)
add(
    "F.sdpa causal",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    (HEADS, HEADS, HEADS),
    _ATTENTION,
)
