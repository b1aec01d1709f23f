"""Matrix products: rows of letters; matmul and einsum need functions."""

from __future__ import annotations

from ..spec import Split
from . import notation
from .signature import Call, RuleFunction, Signature
from .table import Row, add_rows


def matmul(call: Call, parts: int) -> list[Signature]:
    """torch.matmul: vectors, matrices and batches of them."""
    a, b = call.operands
    left = "k" if a.ndim == 1 else "...mk"
    right = "k" if b.ndim == 1 else "...kn"
    out = "..." + ("m" if a.ndim > 1 else "") + ("n" if b.ndim > 1 else "")
    if a.ndim == 1 and b.ndim == 1:
        out = ""
    elif a.ndim <= 2 and b.ndim <= 2:
        left, right, out = (text.replace("...", "") for text in (left, right, out))
    return list(notation.signatures(f"{left}, {right} -> {out}", (tuple(a.shape), tuple(b.shape))))


def einsum(call: Call, parts: int) -> list[Signature]:
    """torch.einsum with its equation as the rule."""
    equation = call.args[0].replace(" ", "")
    if "->" not in equation:
        letters = equation.replace(",", "").replace("...", "")
        kept = sorted(c for c in set(letters) if letters.count(c) == 1)
        dots = "..." if "..." in equation else ""
        equation = f"{equation}->{dots}{''.join(kept)}"
    left, right = equation.split("->")
    shapes = tuple(tuple(operand.shape) for operand in call.operands)
    return list(notation.signatures(f"{left.replace(',', ', ')} -> {right}", shapes))


def tensordot(call: Call, parts: int) -> list[Signature]:
    """Letters for the dims of both, the same one for dims that meet."""
    a, b = call.operands
    meet_a, meet_b = (
        [d % x.ndim for d in call.get(name)] for x, name in ((a, "dims_self"), (b, "dims_other"))
    )
    names = iter("abcdefghijklmnopqrstuvwxyz")
    left = [next(names) for _ in range(a.ndim)]
    right = [next(names) for _ in range(b.ndim)]
    for i, j in zip(meet_a, meet_b, strict=True):
        if a.shape[i] != b.shape[j]:
            return [call.whole()]
        right[j] = left[i]
    kept = [c for d, c in enumerate(left) if d not in meet_a]
    kept += [c for d, c in enumerate(right) if d not in meet_b]
    rule = f"{''.join(left)}, {''.join(right)} -> {''.join(kept)}"
    return list(notation.signatures(rule, (tuple(a.shape), tuple(b.shape))))


def plus_product(rule: str, partial: notation.Partial = None) -> RuleFunction:
    """c + a @ b: the rule with its first operand, which broadcasts against the result, lined up
    with it."""

    def signatures(call: Call, parts: int) -> list[Signature]:
        left, out = rule.split("->")
        letters = out.strip()
        ndim = call.operands[0].ndim
        first = letters[len(letters) - ndim :]
        shapes = tuple(tuple(operand.shape) for operand in call.operands)
        return list(notation.signatures(f"{first} + {left}-> {letters}", shapes, partial))

    return signatures


def addmv(call: Call, parts: int) -> list[Signature]:
    """c + a @ x. Torch does not broadcast a c of one element to an empty shard."""
    made = plus_product("mk, k -> m")(call, parts)
    if call.operands[0].shape == call.outs[0].shape:
        return made
    return [s for s in made if not isinstance(s.outs[0], Split)]


ROWS = (
    Row("_addmm_activation", plus_product("m[k], [k]n -> mn", "none")),
    Row("addbmm", plus_product("bmk, bkn -> mn")),
    Row("addmm", plus_product("mk, kn -> mn")),
    Row("addmv", addmv),
    Row("addr", plus_product("m, n -> mn")),
    Row("baddbmm", plus_product("bmk, bkn -> bmn")),
    Row("bilinear", "...[i], ...j, oij + o -> ...o"),
    Row("bmm", "bmk, bkn -> bmn"),
    Row("dot vdot", "k, k -> "),
    Row("einsum", einsum),
    Row("linear", "...i, oi + o -> ...o"),
    Row("matmul", matmul),
    Row("mm", "mk, kn -> mn"),
    Row("mv", "mk, k -> m"),
    Row("outer ger", "m, n -> mn"),
    Row("tensordot", tensordot, "self other dims_self dims_other"),
)

add_rows(ROWS)
