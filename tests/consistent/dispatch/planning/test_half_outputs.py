"""Ops whose kernels give halves in other dtypes or sizes than torch's meta forms say: every rank,
those outside the placement too, has what plain torch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import consistent
import tests.samples  # noqa: F401
from benchmarks.coverage_cases import RANDOM, map_tensors, operators, tensors_in
from consistent import B, Placement, S
from tests.ranks import ALL, on_ranks, simulate

HALVES = (torch.bfloat16, torch.float16)
KNOWN = ("native_layer_norm", "native_batch_norm")


def _given(sample: Any) -> tuple:
    return map_tensors((sample.input, sample.args, sample.kwargs), lambda x: x.detach())


def _outputs(op: Any, given: tuple) -> list[tuple]:
    x, args, kwargs = map_tensors(given, lambda x: x.clone())
    return [(t.dtype, tuple(t.shape)) for t in tensors_in(op.op(x, *args, **kwargs))]


def _differing() -> list[tuple[str, Any, list[tuple]]]:
    """(name, given, what comes out) of calls whose meta form says something else."""
    found = []
    ops = operators()
    # By default some of all, the ops among them that are known to differ.
    some = {**dict(list(ops.items())[::8]), **{name: ops[name] for name in KNOWN}}
    for name, op in (ops if ALL else some).items():
        for dtype in HALVES[: 2 if ALL else 1] if not RANDOM.search(name) else ():
            if dtype in op.dtypes:
                found += [(name, *one) for one in _differing_of(op, dtype)]
    return found


def _differing_of(op: Any, dtype: torch.dtype) -> list[tuple[Any, list[tuple]]]:
    found = []
    torch.manual_seed(0)
    for _, sample in zip(range(3 if ALL else 1), op.sample_inputs("cpu", dtype), strict=False):
        given = _given(sample)
        try:
            wanted = _outputs(op, given)
            said = _outputs(op, map_tensors(given, lambda x: x.to("meta")))
        except Exception:  # noqa: BLE001  (no meta form, or none for halves)
            continue
        if wanted != said:
            found.append((given, wanted))
    return found


@pytest.mark.filterwarnings("ignore")
def test_dtypes_and_sizes_are_those_of_the_kernels() -> None:
    """On simulated ranks: each process takes seconds to import torch's database of ops."""
    cases = _differing()
    assert set(KNOWN) <= {name for name, _, _ in cases}
    for wrong in simulate(_wrong, 2, cases):
        assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:20])


def _wrong(rank: int, cases: list[tuple[str, Any, list[tuple]]]) -> list[str]:
    wrong = []
    for name, given, wanted in cases:
        for ranks, entry in (([0], B), ([1], S(0)), ([0, 1], B), ([1, 0], S(0)), ([0, 1], S(1))):
            placement = Placement("cpu", ranks)

            def lay(x: Any, placement: Any = placement, entry: Any = entry) -> Any:
                return consistent.distribute(x, placement, entry if x.ndim > 1 else B)

            found = _outputs(operators()[name], map_tensors(given, lay))
            if found != wanted:
                wrong.append(f"{name} {ranks} {entry}: {found}, not {wanted}")
    return wrong


@pytest.mark.parametrize("half", HALVES, ids=str)
@on_ranks(2, 3)
def test_statistics_of_a_normalization(rank: int, half: torch.dtype) -> None:
    x, w = torch.randn(4, 6, 5).to(half), torch.ones(5)
    for weight in (None, w, w.to(half)):
        wanted = torch.native_layer_norm(x, [5], weight, weight, 1e-5)
        for ranks in ([0], [1, 0]):
            for entry in (B, S(0), S(2)):
                placement = Placement("cpu", ranks)
                given: Any = consistent.distribute(x, placement, entry)
                found = torch.native_layer_norm(given, [5], weight, weight, 1e-5)
                for y, z in zip(found, wanted, strict=True):
                    whole: Any = y.full()
                    assert y.dtype == whole.dtype == z.dtype, (entry, ranks, y.dtype)
                    torch.testing.assert_close(whole, z, rtol=0.02, atol=0.02)
