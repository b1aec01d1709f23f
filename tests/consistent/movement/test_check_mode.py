"""Check mode names the rank that went astray."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from consistent.movement import check_mode as checking
from consistent.movement.check_mode import check_equal, check_mode, check_shard, set_current_op
from consistent.movement.run import run
from consistent.spec import B, P, Placement, S, TensorSpec
from mirrored.transports.counting import counting
from tests.ranks import ALL, pool, simulate


def three() -> Placement:
    return Placement("cpu", [0, 1, 2])


def of(sbp, placement=None) -> TensorSpec:
    return TensorSpec.of(placement or three(), sbp, (6,), torch.float32)


def branching(rank: int) -> None:
    with check_mode():
        set_current_op("matmul")
        if rank == 1:
            run(torch.zeros(6), of(B), of(P))
        else:
            run(torch.zeros(6), of(B), of(S(0)))


def test_another_branch_is_named_with_both_call_sites():
    with pytest.raises(RuntimeError) as error:
        simulate(branching, 3)
    text = str(error.value)
    assert "ranks are about to do different boxings" in text
    lines = {
        line.split(":")[0].strip(): line
        for line in text.splitlines()
        if line.startswith("    rank")
    }
    first = branching.__code__.co_firstlineno
    for rank, line, target in [(0, 6, "S(0)"), (1, 4, "P"), (2, 6, "S(0)")]:
        assert f"matmul at {__file__}:{first + line}:" in lines[f"rank {rank}"]
        assert f"-> f32[6] {target} on" in lines[f"rank {rank}"]


def test_gloo_ranks_all_raise():
    with pytest.raises(RuntimeError, match="different boxings"):
        pool(3).run(branching)


def same_boxing_other_line(rank: int) -> None:
    with check_mode():
        if rank == 0:
            run(torch.zeros(6), of(B), of(P))
        else:
            run(torch.zeros(6), of(B), of(P))


def test_the_same_boxing_from_another_line_is_another_branch():
    with pytest.raises(RuntimeError, match="different boxings"):
        simulate(same_boxing_other_line, 3)


def wrong_shard(rank: int) -> None:
    with check_mode():
        run(torch.zeros(3 if rank == 2 else 2), of(S(0)), of(B))


def test_a_shard_off_its_spec_is_named_with_its_rank():
    with pytest.raises(
        RuntimeError, match=r"rank 2: holds torch.float32 \(3,\), and its spec says .* \(2,\)"
    ):
        simulate(wrong_shard, 3)


def wrong_dtype(rank: int) -> None:
    with check_mode():
        check_shard(
            torch.zeros(2, dtype=torch.float64 if rank else torch.float32), of(S(0)), "from_local"
        )


def test_a_shard_of_another_dtype_is_named():
    with pytest.raises(RuntimeError, match=r"from_local[\s\S]*rank 1: holds torch.float64"):
        simulate(wrong_dtype, 3)


def unequal(rank: int) -> None:
    with check_mode():
        check_equal(torch.full((2,), float(rank == 1)), three(), "the mask given to where")


def test_values_taken_as_broadcast_are_compared():
    with pytest.raises(RuntimeError, match="the mask given to where is taken as broadcast"):
        simulate(unequal, 3)


def equal(rank: int) -> None:
    with check_mode():
        for dtype in (torch.float32, torch.bool, torch.bfloat16, torch.complex64, torch.int64):
            check_equal(torch.ones(2, 3, dtype=dtype).t(), three(), "x")
        check_equal(torch.tensor(float("nan")), three(), "x")
        check_equal(torch.empty(0), three(), "x")
        run(torch.zeros(6), of(B), of(P))


def test_equal_values_and_equal_boxings_pass():
    simulate(equal, 3)


def outside(rank: int) -> int:
    pair = Placement("cpu", [1, 2])
    with counting() as log, check_mode():
        x = torch.empty(6, device="meta" if rank == 0 else "cpu")
        run(x, of(B, pair), of(P, pair))
        check_equal(torch.tensor(rank == 0), pair, "x")
    return len(log.calls)


def test_rank_outside_the_placement_takes_no_part():
    assert simulate(outside, 3) == [0, 2, 2]


def off_by_default(rank: int) -> int:
    with counting() as log:
        run(torch.zeros(6), of(B), of(P) if rank else of(S(0)))
        check_equal(torch.tensor(rank), three(), "x")
    return len(log.calls)


def test_off_it_sends_nothing():
    assert not checking.enabled
    assert simulate(off_by_default, 3) == [0, 0, 0]


def nested(rank: int) -> list[bool]:
    with check_mode():
        with check_mode():
            pass
        return [checking.enabled]


def test_mode_nests_and_ends():
    assert simulate(nested, 1) == [[True]]
    assert not checking.enabled


@pytest.mark.skipif(not ALL, reason="the test below reads the environment without an interpreter")
def test_environment_switches_it_on():
    code = "from consistent.movement import check_mode as checking; print(checking.enabled)"
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={"CONSISTENT_CHECK": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "True"


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_values_of_the_environment(monkeypatch, value, on):
    monkeypatch.setenv("CONSISTENT_CHECK", value)
    spec = importlib.util.spec_from_file_location(f"{checking.__name__}_anew", checking.__file__)
    anew = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, anew)
    spec.loader.exec_module(anew)
    assert anew.enabled is on
