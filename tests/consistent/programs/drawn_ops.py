"""The ops of random programs, a few of each family. A draw appends one line to the program.

Ops with kinks and ties are drawn where the operand is away from them: what a partial sum adds up to
may differ from plain torch's in the last bit, and a kink makes that a different gradient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from hypothesis import assume
from hypothesis import strategies as st

if TYPE_CHECKING:
    from tests.consistent.programs.drawing import Drawing as D

_GAP = 1e-6


# -- what an operand must be -----------------------------------------------------------------------


def smooth(x: torch.Tensor, *kinks: float) -> bool:
    """Whether no element is at one of ``kinks``."""
    return all(bool(((x - kink).abs() > _GAP).all()) for kink in kinks)


def distinct(x: torch.Tensor) -> bool:
    """Whether no two elements tie."""
    return bool((x.flatten().sort().values.diff() > _GAP).all())


def off_zero(x: torch.Tensor) -> bool:
    return smooth(x, 0.0)


def some(x: torch.Tensor) -> bool:
    return x.ndim > 0 and x.numel() > 0


def some_distinct(x: torch.Tensor) -> bool:
    return some(x) and distinct(x)


def _broadcast(d: D, x: str) -> str:
    """A name whose shape meets that of ``x``."""
    shape = d.names[x].shape
    return d.pick(lambda y: all(a == b or 1 in (a, b) for a, b in zip(shape[::-1], y.shape[::-1])))


# -- elementwise -----------------------------------------------------------------------------------


def unary(d: D) -> None:
    name = d.among(
        *"sin tanh sigmoid neg exp square erf atan cosh clone asinh expm1 F.gelu F.silu F.softplus "
        "F.logsigmoid".split()
    )
    d.add(f"{name if '.' in name else 'torch.' + name}({d.pick()})")


def kinked(d: D) -> None:
    x = d.pick(off_zero)
    d.add(
        d.among(
            "torch.relu({0})", "torch.abs({0})", "F.leaky_relu({0}, 0.1)", "F.elu({0})",
            "torch.where({0} > 0, {0}, {0} * 0.5)", "{0}.masked_fill({0} < 0, 0.25)",
            "{0}.clamp(min=0)", "torch.reciprocal({0}.abs() + 1)", "({0}.abs() + 1).log()",
            "({0}.abs() + 0.5).sqrt()", "torch.sign({0}) * {0}", "torch.nan_to_num({0})",
        ).format(x)
    )  # fmt: skip


def scalar(d: D) -> None:
    d.add(
        d.among(
            "{} * 3", "2.5 - {}", "{} / 4", "{} ** 2", "1 + {}", "-{}", "torch.mul({}, -0.5)",
            "torch.add({}, 1.5, alpha=2)",
        ).format(d.pick())
    )  # fmt: skip


def binary(d: D) -> None:
    x = d.pick()
    y = _broadcast(d, x)
    d.add(
        d.among(
            "{} + {}", "{} * {}", "{} - {}", "{} / ({}.abs() + 1)", "torch.atan2({}, {} + 3)",
            "torch.lerp({0}, {1}, 0.3)", "torch.addcmul({0}, {1}, {0}, value=0.5)",
            "torch.hypot({}, {} + 4)", "torch.logaddexp({}, {})",
            "torch.where(torch.tensor(True), {}, {})",
        ).format(x, y)
    )  # fmt: skip


def larger(d: D) -> None:
    x = d.pick()
    y = _broadcast(d, x)
    assume(off_zero(d.names[x] - d.names[y]))
    d.add(f"torch.{d.among('maximum', 'minimum', 'fmax')}({x}, {y})")


def plain_operand(d: D) -> None:
    x = d.pick()
    d.add(f"{x} {d.among('*', '+', '-')} {d.plain(d.names[x].shape)}")


# -- products --------------------------------------------------------------------------------------


def matmul(d: D) -> None:
    x = d.pick(lambda v: v.ndim >= 1)
    rows = d.names[x].shape[-1]
    y = d.pick(lambda v: v.ndim in (1, 2) and v.shape[0] == rows)
    d.add(d.among("{} @ {}", "torch.matmul({}, {})", "torch.tensordot({}, {}, 1)").format(x, y))


def linear(d: D) -> None:
    x = d.pick(lambda v: v.ndim >= 1)
    inner = d.names[x].shape[-1]
    w = d.pick(lambda v: v.ndim == 2 and v.shape[1] == inner)
    bias = f", {d.plain([d.names[w].shape[0]])}" if d.draw(st.booleans()) else ""
    d.add(f"F.linear({x}, {w}{bias})")


def products(d: D) -> None:
    x = d.pick(lambda v: v.ndim == 2)
    d.add(
        d.among(
            "torch.einsum('ij,ik->jk', {0}, {0})", "torch.einsum('ij,kj->ik', {0}, {0})",
            "torch.outer({0}[:, 0], {0}.sum(1))", "torch.mm({0}.t(), {0})", "{0}.t() @ {0}",
            "torch.bmm({0}.unsqueeze(0), {0}.t().unsqueeze(0))", "torch.kron({0}, {0}[:1])",
            "torch.linalg.multi_dot([{0}, {0}.t(), {0}])", "torch.cdist({0}, {0} + 3)",
            "torch.addmm({0}, torch.mm({0}, {0}.t()), {0})",
            "torch.matrix_exp(0.1 * ({0} @ {0}.t()))",
            "torch.linalg.inv({0} @ {0}.t() + 3 * torch.eye({1}, dtype=torch.float64))",
        ).format(x, d.names[x].shape[0])
    )  # fmt: skip


def attention(d: D) -> None:
    x = d.pick(lambda v: v.ndim >= 2 and v.numel() > 0)
    causal = d.draw(st.booleans())
    d.add(f"F.scaled_dot_product_attention({x}, {x}, {x}, is_causal={causal})")


def convolution(d: D) -> None:
    x = d.pick(lambda v: v.ndim == 3 and v.numel() > 0 and v.shape[2] > 1)
    channels = d.names[x].shape[1]
    d.add(
        d.among(
            f"F.conv1d({x}, {d.plain([3, channels, 2])}, padding={d.among('0', '1')})",
            f"F.conv1d({x}, {d.plain([2, channels, 2])}, {d.plain([2])}, stride=2)",
            f"F.avg_pool1d({x}, 2)",
            f"F.conv_transpose1d({x}, {d.plain([channels, 2, 2])}, stride=2)",
            f"F.interpolate({x}, scale_factor=2, mode='linear')",
        )
    )


# -- reductions, scans, orders ---------------------------------------------------------------------


def reduction(d: D) -> None:
    x = d.pick()
    name = d.among(*"sum mean sum logsumexp prod var nansum".split())
    assume(d.names[x].numel() or name == "sum")
    if name in ("sum", "mean") and d.draw(st.booleans()):
        d.add(f"{x}.{name}()")
    else:
        extra = ", correction=0" if name == "var" else ""
        d.add(f"{x}.{name}(dim={d.dim(x)}, keepdim={d.draw(st.booleans())}{extra})")


def norm_of(d: D) -> None:
    x = d.pick(lambda v: some(v) and off_zero(v))
    p = d.among("1", "2", "3.5")
    d.add(f"torch.linalg.vector_norm({x}, {p}, {d.dim(x)}, keepdim={d.draw(st.booleans())})")


def extreme(d: D) -> None:
    x = d.pick(some_distinct)
    name = d.among("amax", "amin")
    d.add(f"{x}.{name}({d.dim(x)}, keepdim={d.draw(st.booleans())})")


def bounded(d: D) -> None:
    """Without gradients, so that the result stays P(max) or P(min)."""
    x = d.pick(some)
    dim = d.dim(x)
    d.add(
        d.among(
            "{0} - {0}.detach().amax({1}, keepdim=True)",
            "{0} * torch.maximum({0}.detach().amax({1}), {0}.detach().amin({1})).exp().amax()",
            "{0} / (2 + {0}.detach().abs().amax({1}, keepdim=True).tanh())",
            "{0} + (-{0}.detach().amin()).relu()",
            "{0} * ({0} > 0.3).any({1}, keepdim=True)",
            "{0} * (1 + ({0} > -0.5).all())",
            "{0}.detach().max().clamp(-1, 1).unsqueeze(0) + {0}",
        ).format(x, dim)
    )


def along(d: D) -> None:
    x = d.pick()
    name = d.among(
        "torch.softmax", "F.log_softmax", "torch.cumsum", "torch.logcumsumexp", "F.softmin"
    )
    d.add(f"{name}({x}, {d.dim(x)})")


def ordered(d: D) -> None:
    x = d.pick(some_distinct)
    dim = d.dim(x)
    n = d.names[x].shape[dim]
    k = d.draw(st.integers(1, n))
    kinds = [
        f"torch.sort({x}, {dim}, descending={d.draw(st.booleans())})",
        f"torch.topk({x}, {k}, {dim})", f"torch.max({x}, {dim})", f"torch.min({x}, {dim}, True)",
        f"torch.kthvalue({x}, {k}, {dim})", f"torch.median({x}, {dim})",
        f"torch.cummax({x}, {dim})", f"torch.aminmax({x}, dim={dim})",
        f"torch.var_mean({x}, {dim}, correction=0)",
    ]  # fmt: skip
    d.add(d.among(*kinds), 2)


# -- norms and losses ------------------------------------------------------------------------------


def norm(d: D) -> None:
    x = d.pick(lambda v: v.ndim >= 2 and v.shape[-1] > 1 and v.numel() > v.shape[1] > 0)
    n, c = d.names[x].shape[-1], d.names[x].shape[1]
    d.add(
        d.among(
            f"F.layer_norm({x}, ({n},), eps=0.1)",
            f"F.layer_norm({x}, ({n},), {d.plain([n])}, {d.plain([n])}, eps=0.1)",
            f"F.rms_norm({x}, ({n},), eps=0.1)",
            f"F.batch_norm({x}, None, None, {d.plain([c])}, training=True, eps=0.1)",
            f"F.group_norm({x}, {c}, eps=0.1)",
            f"F.normalize({x} + 2, dim={d.dim(x)})",
        )
    )


def loss(d: D) -> None:
    x = d.pick(lambda v: v.ndim == 2 and v.numel() > 0)
    rows, classes = d.names[x].shape
    target = f"torch.arange({rows}) % {classes}"
    d.add(
        d.among(
            f"F.cross_entropy({x}, {target})",
            f"F.cross_entropy({x}, {target}, label_smoothing=0.1, reduction='none')",
            f"F.nll_loss(F.log_softmax({x}, 1), {target}, ignore_index=1, reduction='sum')",
            f"F.mse_loss({x}, {d.plain([rows, classes])})",
            f"F.smooth_l1_loss({x}, {d.plain([rows, classes])} + 5)",
            f"F.binary_cross_entropy_with_logits({x}, torch.ones_like({x}))",
            f"F.cosine_similarity({x} + 1.5, {d.plain([rows, classes])} + 2, {d.dim(x)})",
        )
    )


# -- shapes ----------------------------------------------------------------------------------------


def transpose(d: D) -> None:
    x = d.pick(lambda v: v.ndim >= 1)
    d.add(
        d.among(
            f"{x}.transpose({d.dim(x)}, {d.dim(x)})", f"{x}.movedim({d.dim(x)}, 0)",
            f"{x}.unsqueeze({d.dim(x)})", f"{x}.squeeze()", f"{x}.flip({d.dim(x)})",
            f"{x}.roll({d.draw(st.integers(-3, 3))}, {d.dim(x)})", f"{x}.contiguous()",
            f"{x}.permute(*torch.arange({d.names[x].ndim}).flip(0).tolist())",
        )
    )  # fmt: skip


def view(d: D) -> None:
    x = d.pick()
    shape = list(d.names[x].shape)
    choices = ["-1"] if shape and d.names[x].numel() else []
    choices += [f"{shape[0] * shape[1]}, *{shape[2:]}"] if len(shape) > 1 else []
    choices += [
        f"{n // f}, {f}, *{shape[1:]}" for n in shape[:1] for f in (2, 3) if n and n % f == 0
    ]
    choices += [", ".join(map(str, [1, *shape]))]
    d.add(f"{x}.reshape({d.among(*choices)})")


def index(d: D) -> None:
    x = d.pick(lambda v: v.ndim >= 1 and v.shape[0] > 0)
    n = d.names[x].shape[0]
    k = d.draw(st.integers(-n, n - 1))
    kinds = [
        f"[{k}]", f"[{k}:]", f"[:{k}]", "[::2]", f"[..., {k % max(1, d.names[x].shape[-1])}:]",
        f"[[{k}, 0]]", "[None]", f"[torch.tensor([{k}, 0, {n - 1}])]",
        f".index_select(0, torch.tensor([{k % n}, 0]))", f".narrow(0, {k % n}, 1)",
        f".select(0, {k})", f".take(torch.tensor([[0, {k}]]))",
        f".gather(0, torch.zeros({tuple(d.names[x].shape)}, dtype=torch.int64)[:1])",
    ]  # fmt: skip
    d.add(f"{x}{d.among(*kinds)}")


def masked(d: D) -> None:
    x = d.pick(lambda v: some(v) and smooth(v, 0.0))
    d.add(
        d.among(
            "{0}[{0} > 0]", "{0}.masked_select({0} < 0)", "{0}[({0} > 0).nonzero(as_tuple=True)]",
            "torch.where({0} > 0, {0}, 0.0)",
        ).format(x)
    )  # fmt: skip


def scatter(d: D) -> None:
    x = d.pick(lambda v: v.ndim >= 1 and v.shape[0] > 1)
    shape = tuple(d.names[x].shape)
    places = f"torch.tensor([1, 0, 1])[:{min(3, shape[0])}]"
    source = f"{x}[:{min(3, shape[0])}].clone()"
    d.add(
        d.among(
            f"{x}.index_add(0, {places}, {source} * 2)",
            f"{x}.index_copy(0, torch.tensor([1, 0]), {x}[:2].flip(0))",
            f"{x}.index_fill(0, torch.tensor([1]), 0.5)",
            f"{x}.scatter_add(0, torch.zeros({shape}, dtype=torch.int64)[:2], {x}[:2])",
            f"{x}.slice_scatter({x}[:1], 0, 1, 2)",
        )
    )


def join(d: D) -> None:
    x = d.pick(lambda v: v.ndim >= 1)
    y = d.pick(lambda v: v.shape == d.names[x].shape)
    d.add(f"torch.{d.among('cat', 'stack')}([{x}, {y}, {x}], {d.dim(x)})")


def cut(d: D) -> None:
    x = d.pick(lambda v: v.ndim >= 1 and v.shape[0] > 1)
    n = d.names[x].shape[0]
    kinds = [f"{x}.split([1, {n - 1}])", f"{x}.tensor_split(2)"]
    kinds += [f"{x}.chunk(2)"] if n > 1 else []
    kinds += [f"{x}.unbind(0)"] if n == 2 else []
    d.add(d.among(*kinds), 2)


def repeat(d: D) -> None:
    x = d.pick(lambda v: v.ndim < 3)
    ndim = d.names[x].ndim
    d.add(
        d.among(
            f"{x}.expand(2, {', '.join(['-1'] * ndim)})",
            f"{x}.repeat(2, {', '.join(['1'] * ndim)})",
            f"{x}.repeat_interleave(2)", f"torch.tile({x}, (2,))",
        )
    )  # fmt: skip


def window(d: D) -> None:
    x = d.pick(lambda v: v.ndim >= 2 and min(v.shape[-2:]) > 1)
    d.add(
        d.among(
            f"{x}.tril({d.draw(st.integers(-1, 1))})", f"{x}.triu()", f"{x}.diagonal(0, -2, -1)",
            f"{x}.diff(dim={d.dim(x)})", f"{x}.unfold({d.dim(x)}, 2, 1)", f"F.pad({x}, (1, 2))",
            f"F.pad({x}, (0, 0, 1, 0), value=0.5)", f"torch.diag_embed({x})", f"torch.rot90({x})",
            f"torch.fft.fft({x}, dim={d.dim(x)}).real", f"torch.fft.rfft({x}).abs().square()",
            f"{x}.cumprod({d.dim(x)})",
        )
    )  # fmt: skip


# -- writing ---------------------------------------------------------------------------------------


def in_place(d: D) -> None:
    x = d.pick(lambda v: v.grad_fn is not None)
    shape = tuple(d.names[x].shape)
    kinds = [
        f"{x}.mul_(2.0)", f"{x}.add_(1.0)", f"{x}.sub_(torch.ones({shape}, dtype=torch.float64))",
        f"{x}.neg_()", f"{x}.sin_()", f"{x}.copy_({x}.clone() * 0.5)", f"{x}.div_(3)",
    ]  # fmt: skip
    if smooth(d.names[x], -0.5):
        kinds.append(f"{x}.clamp_(min=-0.5)")
    if off_zero(d.names[x]):
        kinds += [f"{x}.masked_fill_({x} > 0, 0.25)", f"{x}[{x} > 0] = 0.75", f"{x}.relu_()"]
    if shape and shape[0]:
        kinds += [
            f"{x}[0] = 0.5", f"{x}[-1:] *= 2", f"{x}[::2] += 1",
            f"{x}[torch.tensor([0, {shape[0] - 1}])] = 0.125",
            f"{x}.index_fill_(0, torch.tensor([0]), 2.0)",
        ]  # fmt: skip
    d.write(d.among(*kinds))


def in_place_of_two(d: D) -> None:
    x = d.pick(lambda v: v.grad_fn is not None)
    shape = d.names[x].shape
    y = d.pick(lambda v: v.shape == shape)
    assume(math.prod(shape) > 0)
    d.write(d.among(f"{x}.add_({y})", f"{x}.mul_({y}.clone())", f"{x}.copy_({y})"))


OPS = [
    unary, kinked, scalar, binary, larger, plain_operand, matmul, linear, products, attention,
    convolution, reduction, norm_of, extreme, bounded, along, ordered, norm, loss, transpose, view,
    index, masked, scatter, join, cut, repeat, window, in_place, in_place_of_two,
]  # fmt: skip
