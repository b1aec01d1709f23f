"""Rules of matmuls, in letters; for einsum and tensordot they are written for each call."""

from __future__ import annotations

from string import ascii_lowercase

import torch

from ....spec import B, S
from ... import notation
from ...signature import Call, DoesNotFit, Operand, Out, Signature
from ...table import Row, add_rows


def einsum(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of torch.einsum, whose equation is the rule.

    Letters are made lower-case, and the output is added if the equation has none.

    Raises:
        DoesNotFit: the equation is given as lists of numbers, or has more than 26 letters.
    """
    argument = call.get("equation")
    if not isinstance(argument, str):
        raise DoesNotFit("an equation of lists of numbers")
    equation = _with_lower_case_letters(argument.replace(" ", ""))
    if "->" not in equation:
        letters = equation.replace(",", "").replace("...", "")
        out_letters = sorted(c for c in set(letters) if letters.count(c) == 1)
        dots = "..." if "..." in equation else ""
        equation = f"{equation}->{dots}{''.join(out_letters)}"
    left, right = equation.split("->")
    return notation.signatures_of_text(f"{left} -> {right}", call, parts)


def _with_lower_case_letters(equation: str) -> str:
    """Return the equation with lower-case letters: capitals have another meaning in a rule.

    ``"Ab,bC->AC"`` -> ``"ab,bc->ac"``: letters are renamed in the order in which they occur.
    """
    letters = dict.fromkeys(char for char in equation if char.isalpha())
    if len(letters) > len(ascii_lowercase):
        raise DoesNotFit("more than 26 letters")
    return equation.translate(str.maketrans(dict(zip(letters, ascii_lowercase, strict=False))))


def tensordot(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of tensordot, by a rule in which summed dims share a letter.

    For ``tensordot(a, b, dims=1)`` of matrices it is `ab, bd -> ad`. So a summed dim is split in
    both operands, and gives P; any other dim stays split.
    """
    a, b = call.require_operands(2)
    summed_a, summed_b = (
        [d % x.ndim for d in call.get(name)] for x, name in ((a, "dims_self"), (b, "dims_other"))
    )
    if a.ndim + b.ndim > len(ascii_lowercase):
        raise DoesNotFit("more than 26 dims")
    names = iter(ascii_lowercase)
    left = [next(names) for _ in range(a.ndim)]
    right = [next(names) for _ in range(b.ndim)]
    for i, j in zip(summed_a, summed_b, strict=True):
        if a.shape[i] != b.shape[j]:
            return [call.broadcast_signature()]
        right[j] = left[i]
    out_letters = [c for d, c in enumerate(left) if d not in summed_a]
    out_letters += [c for d, c in enumerate(right) if d not in summed_b]
    return notation.signatures_of_text(
        f"{''.join(left)}, {''.join(right)} -> {''.join(out_letters)}", call, parts
    )


def grouped_mm_outs(call: Call) -> list[Out]:
    """Return the output of _grouped_mm, whose meta kernel refuses float32.

    With two matrices, ``offs`` divides the summed dim, and the output has a matrix per group.
    """
    x, w, *offs = call.operands
    shape = [*x.shape[:-1], w.shape[-1]]
    if x.ndim == 2 and w.ndim == 2:
        shape = [offs[0].shape[0], *shape]
    elif x.ndim == 3 and w.ndim == 2:
        shape = shape[1:]
    return [Out(torch.Size(shape), call.get("out_dtype") or x.spec.dtype)]


def scaled_mm(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of _scaled_mm: rows of the first or columns of the second split.

    Scales per row or column are split with them. The summed dim stays whole: each rank's addend
    would be rounded to the dtype of the result, while the kernel rounds only the whole sum.
    """
    x, w = call.operands[:2]
    signatures = [call.new_signature({}, B, "scaled_mm")]
    scale_arguments = [call.get(f"scale_{name}") for name in "ab"]
    scales = [s[0] if isinstance(s, list | tuple) and len(s) == 1 else s for s in scale_arguments]
    swizzles = [name for name in ("swizzle_a", "swizzle_b") if name in call.params]
    is_swizzled = any(any(call.get(name) or ()) for name in swizzles)
    scale_operands = [s for s in scales if isinstance(s, Operand)]
    if is_swizzled or len(scale_operands) < len(scales):
        return signatures
    (rows, _), (_, columns) = x.shape, w.shape
    bias = call.get("bias")
    split_scale_shapes = (rows, 1), (1, columns)
    for dim, matrix, scale in zip((0, 1), (x, w), scale_operands, strict=True):
        ins = {matrix.index: S(dim)}
        if tuple(scale.shape) == split_scale_shapes[dim]:
            ins[scale.index] = S(dim)
        elif scale.shape.numel() != 1:
            continue
        if dim and bias is not None:
            ins[bias.index] = S(0)
        signatures.append(call.new_signature(ins, S(dim), "scaled_mm", by_size=True))
    return signatures


def scaled_mm_outs(call: Call) -> list[Out]:
    """Return the output of _scaled_mm, since its meta kernel checks the second matrix's strides."""
    x, w = call.operands[:2]
    return [Out(torch.Size((x.shape[0], w.shape[1])), call.get("out_dtype") or x.spec.dtype)]


def addmm_rules(out: str, product: str) -> tuple[str, ...]:
    """Return the rules of c + a @ b, where c may have fewer dims and broadcasts.

    ``addmm_rules("mn", "mk, kn")`` is the rules ``"mn + mk, kn -> mn"``, ``"n + ..."`` and ``" +
    ..."``.
    """
    return tuple(f"{out[i:]} + {product} -> {out}" for i in range(len(out) + 1))


_ADDMM_PARAMS = "input mat1 mat2"
_SCALED_MM_PARAMS = "input mat2 scale_a scale_b bias scale_result out_dtype use_fast_accum"
_SCALED_MM_V2_PARAMS = (
    "input mat2 scale_a recipe_a swizzle_a scale_b recipe_b swizzle_b bias out_dtype "
    "contraction_dim use_fast_accum"
)

# The letter in f([h]) is the number of groups; the third operand is always whole. Torch's kernel
# takes only some numbers of rows, to which shards are padded, so every split is served by a form.
_GROUPED_MM_RULES = (
    "mk, gkn, f([h]) -> mn; mkgn by grouped_mm",
    "[g]mk, k[n], f([h]) -> m[n]; mk by grouped_mm",
    "m[k], [k]n, f([h]) -> [h]mn; mn by grouped_mm",
    "gmk, gkn -> gmn; gmkn by grouped_mm",
)

ROWS = (
    Row("_addmm_activation", ("f(n, m[k], [k]n) -> mn", "f(mn, m[k], [k]n) -> mn"), _ADDMM_PARAMS),
    Row("_grouped_mm", _GROUPED_MM_RULES, "input mat2 offs bias out_dtype", outs=grouped_mm_outs),
    Row("_scaled_mm", scaled_mm, _SCALED_MM_PARAMS, outs=scaled_mm_outs),
    Row("_scaled_mm_v2", scaled_mm, _SCALED_MM_V2_PARAMS, outs=scaled_mm_outs),
    Row("addbmm", addmm_rules("mn", "bmk, bkn"), "input batch1 batch2"),
    Row("addmm", addmm_rules("mn", "mk, kn"), _ADDMM_PARAMS),
    # Never empty (!): torch does not broadcast a c of one element to an empty shard.
    Row("addmv", ("m! + m!k, k -> m!", " + [m]k, k -> [m]"), "input mat vec"),
    Row("addr", addmm_rules("mn", "m, n"), "input vec1 vec2"),
    Row("baddbmm", addmm_rules("bmn", "bmk, bkn"), "input batch1 batch2"),
    Row("bilinear", "...[i], ...j, oij + o -> ...o", "input1 input2 weight bias"),
    Row("bmm", "bmk, bkn -> bmn", "input mat2"),
    Row("dot vdot", "k, k -> ", "input other"),
    Row("einsum", einsum, "equation"),
    Row("linear", "...i, oi + o -> ...o", "input weight bias"),
    Row(
        "matmul",
        ("k, k -> ", "mk, k -> m", "k, ...kn -> ...n", "...mk, k -> ...m", "...mk, ...kn -> ...mn"),
        "input other",
    ),
    Row("mm", "mk, kn -> mn", "input mat2"),
    Row("mv", "mk, k -> m", "input vec"),
    Row("outer ger", "m, n -> mn", "input vec2"),
    Row("tensordot", tensordot, "self other dims_self dims_other"),
)

add_rows(ROWS)
