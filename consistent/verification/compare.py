"""Compare the recorded tensors of a step on several ranks with those of one process, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from mirrored.readable import escape_invisible, on_one_line

from .held import TensorOnRanks, join_parts, to_float64
from .kinds import Near, kind_of
from .watch import Key, RecordedTensor, is_rounded

# The rounding error of one process in the step's own dtype is measured against float64. Another
# order of sums may cause TIMES this error, plus UNITS units in the last place, because the measured
# error may happen to be 0.
TIMES, UNITS = 10, 64
# A tensor that is smaller than this times the largest of its kind is what is left of a sum that
# cancels out. The bound is not smaller, because steps in float64 compute some values in float32.
CANCELED_SIZE = 1e-8


@dataclass
class Wrong:
    """A tensor of a step whose error is larger than rounding explains.

    Args:
        key: which tensor of the step it is.
        where: the line of the program that made it.
        layout: its layout as text.
        kind: a phrase for what is wrong with it.
        error: the largest absolute error of an element.
        allowed: the largest error that rounding explains.
    """

    key: Key
    where: str
    layout: str
    kind: str
    error: float
    allowed: float

    @property
    def beyond(self) -> float:
        """The error as a multiple of the allowed error."""
        return self.error / self.allowed if self.allowed else float("inf")

    @property
    def tensor(self) -> str:
        """A phrase for the tensor, such as ``the gradient of parameter fc.weight``."""
        what, name, number = self.key
        if what == "returned":
            return f"what the step returns ({number})"
        words = {
            "given": "what is given to", "result": "the result of",
            "gradient": "the gradient of the result of", "parameter": "parameter",
        }  # fmt: skip
        call_number = f", call {number + 1}" if number else ""
        return f"{words.get(what, 'the gradient of parameter')} {name}{call_number}"

    def __str__(self) -> str:
        lines = [on_one_line(self.tensor)]
        if self.where:
            lines.append(f"  at {on_one_line(self.where)}")
        lines.append(f"  layout: {on_one_line(self.layout)}")
        lines.append(f"  {on_one_line(self.kind)}")
        lines.append(f"  off by {self.error:.3g}, where rounding explains {self.allowed:.3g}")
        return "\n".join(lines)


@dataclass
class Compared:
    """Result of comparing a step under one plan, or another program, with one process.

    Args:
        name: the plan, or the name given to the program.
        wrong: the tensors that differ, in the order of the program.
        compared: how many tensors were compared.
        error: the error that ended the run; "" if it ended well.
        choice: the first op that chose differently among values that rounding makes equal, such as
            a router's topk; tensors after it were not compared. "" if there was none.
        left: the number of tensors that were not compared.
    """

    name: str
    wrong: list[Wrong] = field(default_factory=list)
    compared: int = 0
    error: str = ""
    choice: str = ""
    left: int = 0

    @property
    def ok(self) -> bool:
        """True if no compared tensor differs, and the run ended without an error."""
        return not self.wrong and not self.error

    @property
    def rest(self) -> str:
        """A sentence on how many tensors were not compared, and why."""
        return (
            f"{self.left} tensors were not compared: they follow {on_one_line(self.choice)}, which "
            "chose otherwise between values that rounding makes equal"
        )

    def __str__(self) -> str:
        name = on_one_line(self.name)
        text = f"{name}: {self.compared} tensors are those of one process"
        if self.wrong:
            text = (
                f"{name}: {len(self.wrong)} of {self.compared} tensors differ from one "
                f"process, the first is\n{_indent(str(self.wrong[0]))}"
            )
        if self.choice:
            text += f"\n  {self.rest}"
        if self.error:
            text += f"\n  and it raised:\n{_indent(_indent(escape_invisible(self.error.strip())))}"
        return text


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def merge_ranks(by_rank: Sequence[Sequence[RecordedTensor]]) -> dict[Key, TensorOnRanks]:
    """Merge the records of all ranks of one run: return for each tensor what each rank holds.

    Tensors are in the order in which rank 0 recorded them, then those that other ranks add.
    """
    tensors: dict[Key, TensorOnRanks] = {}
    for rank, seen in enumerate(by_rank):
        for record in seen:
            tensor = tensors.setdefault(
                record.key,
                TensorOnRanks(record.key, record.where, record.spec, record.dtensor_layout, {}),
            )
            tensor.parts[rank] = record.value
    return tensors


@dataclass
class Reference:
    """Reference values from one process, by which the tensors of other runs are judged.

    ``single`` is a run in the step's own dtype, and ``double`` one in float64; it is empty if the
    step does not run in float64.
    """

    single: dict[Key, TensorOnRanks]
    double: dict[Key, TensorOnRanks]

    def value(self, key: Key) -> Tensor:
        """Return the correct value of a tensor: where possible that of the float64 run."""
        single = self.single[key].values[0]
        exact = to_float64((self.double.get(key) or self.single[key]).values[0])
        if exact.shape != to_float64(single).shape:
            return exact
        return torch.where(self._valid_mask(single, exact), exact, to_float64(single))

    def allowed(self, key: Key) -> float:
        """Return the largest error of an element of this tensor that rounding explains.

        It is ``TIMES`` the error of the run in the step's own dtype, plus ``UNITS`` units in the
        last place.
        """
        single, exact = self.single[key].values[0], self.value(key)
        eps = _eps(single) if key in self.double else max(_eps(single), self._coarsest_eps)
        own_errors, sizes = torch.zeros(()), exact.abs()
        if exact.shape == to_float64(single).shape:
            valid = self._valid_mask(single, exact)
            own_errors, sizes = (to_float64(single) - exact).abs()[valid], sizes[valid]
        size = _max_element(sizes)
        if key in self.double and size < CANCELED_SIZE * self._largest_by_kind[key.what]:
            # A sum that cancels out, such as the gradient of a key bias, leaves the rounding errors
            # of its addends. Their size is unknown; that of the largest such tensor stands for it.
            size = self._largest_by_kind[key.what]
        return TIMES * _max_element(own_errors) + UNITS * eps * size

    @cached_property
    def _largest_by_kind(self) -> dict[str, float]:
        """The largest element of all tensors of each kind, such as "gradient"."""
        largest: dict[str, float] = {}
        for key in self.double.keys() & self.single.keys():
            single, exact = self.single[key].values[0], to_float64(self.double[key].values[0])
            if exact.shape == to_float64(single).shape:
                size = _max_element(exact.abs()[self._valid_mask(single, exact)])
                largest[key.what] = max(size, largest.get(key.what, 0.0))
        return largest

    @cached_property
    def _coarsest_eps(self) -> float:
        """The largest eps of all dtypes in the step, for runs without a float64 reference.

        A value may have been rounded to a dtype of fewer bits before it was cast to its own.
        """
        return max((_eps(held.values[0]) for held in self.single.values()), default=2.0**-23)

    @staticmethod
    def _valid_mask(single: Tensor, exact: Tensor) -> Tensor:
        """Return a mask of the elements for which the float64 run has the correct value.

        The float64 run is not correct at the end of the range of the step's own dtype:
        ``finfo(x.dtype).min``, as in an attention mask, is another number in float64, and values
        that overflow in the step's dtype do not overflow in float64.
        """
        end = torch.finfo(single.dtype).max / 2 if is_rounded(single) else float("inf")
        return to_float64(single).isfinite() & exact.isfinite() & (exact.abs() < end)


def _eps(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps if is_rounded(x) else 2.0**-23


def _max_element(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def until_first_choice(
    right: Reference, other: dict[Key, TensorOnRanks]
) -> tuple[dict[Key, TensorOnRanks], tuple[str, int] | None]:
    """Return the tensors of ``other`` that can be compared, up to a choice that differs.

    A choice is an op such as topk, which returns indices. From the first one that found other
    indices than one process did, the tensors belong to a different computation.

    Args:
        right: the reference.
        other: the tensors of another run.

    Returns:
        (tensors that can be compared, (text of the op that chose, number of tensors after it)),
            with None in place of the pair if no choice differs.
    """
    keys = [key for key in right.single if key in other]
    for i, key in enumerate(keys):
        if key.what == "chosen" and _chose_otherwise(right.single[key].values[0], other[key]):
            text = f"{key.name.removesuffix(' in ')} ({other[key].where})"
            return _without_choices(other, keys[:i]), (text, len(_without_choices(other, keys[i:])))
    return _without_choices(other, keys), None


def _without_choices(
    other: dict[Key, TensorOnRanks], keys: Sequence[Key]
) -> dict[Key, TensorOnRanks]:
    """Return the tensors with ``keys``, except chosen indices, which cannot be nearly equal."""
    return {key: other[key] for key in keys if key.what != "chosen"}


def _chose_otherwise(places: Tensor, tensor: TensorOnRanks) -> bool:
    """Return whether the ranks chose other indices than ``places``, those of one process."""
    if tensor.spec is not None:
        return not torch.equal(tensor.whole(), places)
    whole = join_parts(tensor.values, places.shape)
    return not any(torch.equal(x, places) for x in (*tensor.values, whole) if x is not None)


def differences(right: Reference, other: dict[Key, TensorOnRanks]) -> list[Wrong]:
    """Return all tensors of ``other``, another run, that are wrong, in the order of one process.

    ``right`` is the reference.
    """
    candidates = (_find_wrong(right, other[key]) for key in right.single if key in other)
    return [wrong for wrong in candidates if wrong is not None]


def in_modules(seen: dict[Key, TensorOnRanks]) -> dict[Key, TensorOnRanks]:
    """Return the tensors in ``seen`` without those of ops that run outside modules.

    Another program may use other ops outside modules, so their tensors are not compared.
    """
    between = ("given", "result", "chosen", "gradient")
    return {k: tensor for k, tensor in seen.items() if k.what not in between or " in " in k.name}


def _find_wrong(right: Reference, tensor: TensorOnRanks) -> Wrong | None:
    """Return what is wrong with ``tensor``, or None if it is correct up to rounding."""
    exact, allowed = right.value(tensor.key), right.allowed(tensor.key)
    near = partial(_is_near, allowed or 1e-300)
    values = _wrong_values(tensor, exact, near)
    if not values:
        return None
    previous_key = tensor.key._replace(number=tensor.key.number - 1)
    previous = right.value(previous_key) if previous_key in right.single else None
    if previous is not None and previous.shape != exact.shape:  # not a step earlier: another input
        previous = None
    kind = kind_of(values, exact, len(tensor.parts), near, previous)
    error = max(_largest_difference(value, exact) for value in values)
    return Wrong(tensor.key, tensor.where, tensor.layout, kind, error, allowed)


def _is_near(within: float, a: Tensor, b: Tensor) -> bool:
    """Return whether ``a`` and ``b`` have one shape and differ by at most ``within`` anywhere."""
    close = a.shape == b.shape and torch.isclose(a, b, rtol=0, atol=within, equal_nan=True)
    return bool(torch.as_tensor(close).all())


def _wrong_values(tensor: TensorOnRanks, exact: Tensor, near: Near) -> list[Tensor]:
    """Return the wrong values of a tensor, for ``kind_of``; an empty list if it is correct.

    These are the values of all ranks, if each rank should have the whole and they differ; otherwise
    the one tensor that the ranks' shards make up.

    Args:
        tensor: the tensor as the ranks hold it.
        exact: the correct value.
        near: whether two tensors differ by rounding only.
    """
    values = [to_float64(v) for v in tensor.values]
    if tensor.spec is None:
        return [] if _is_right(tensor, values, exact, near) else values
    joined_value = to_float64(tensor.whole())
    copies_agree = all(
        near(to_float64(v), to_float64(run[0])) for run in tensor.copies() for v in run[1:]
    )
    if copies_agree and near(joined_value, exact):
        return []
    return values if tensor.spec.layout.is_whole and not copies_agree else [joined_value]


def _is_right(tensor: TensorOnRanks, values: list[Tensor], exact: Tensor, near: Near) -> bool:
    """Return whether the ranks' ``values`` of a tensor without a spec are correct.

    Such a tensor is of a program that does not use global tensors. Each rank's value must be the
    whole one. Tensors other than parameters and their gradients may also be shards or addends.
    """
    if all(near(v, exact) for v in values):
        return True
    what = tensor.key.what
    if tensor.dtensor_layout or what in ("parameter", "parameter gradient") or len(values) == 1:
        return False
    return _is_some_layout(values, exact, what, near)


def _is_some_layout(values: list[Tensor], exact: Tensor, what: str, near: Near) -> bool:
    """Return whether the ranks' plain tensors are shards or addends of ``exact``, in any layout.

    The layouts of a program written by hand are unknown. A gradient may also be n or 1/n times as
    large, as for a loss averaged over a rank's own part of the batch.
    """
    n = len(values)
    factors = (1.0, float(n), 1.0 / n) if what == "gradient" else (1.0,)
    candidates = [join_parts(values, exact.shape)]
    if all(v.shape == exact.shape for v in values):
        total = torch.stack(values).sum(0)
        candidates += [total, total / n]
    return any(m is not None and near(m / f, exact) for m in candidates for f in factors)


def _largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference of two tensors; infinite if their shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    errors = (a - b).abs()[a != b].nan_to_num(nan=float("inf"))
    return _max_element(errors)
