"""This host, whose ops are timed by making the calls again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from consistent.auto.machines import Work, machine, replay, work_of
from consistent.auto.machines.measurement_cache import MeasurementCache
from consistent.auto.machines.this_machine import ThisMachine
from consistent.cost_model.built_in import BUILT_IN
from consistent.movement.speeds import device_speeds
from mirrored.transports.default import current
from tests.ranks import pool

aten = torch.ops.aten


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def of(func: Any, *args: Any, **kwargs: Any) -> Work:
    return work_of(func, args, kwargs, func(*args, **kwargs))


@pytest.fixture
def this(tmp_path: Path) -> ThisMachine:
    """This host at its usual pace, with a file of its own; figures of the host are those that were
    kept."""
    known = machine("this")
    assert isinstance(known, ThisMachine)
    given = {name: getattr(known, name) for name in known.__dataclass_fields__}
    return ThisMachine(
        **given | {"measurements": MeasurementCache(tmp_path / "kept.jsonl"), "host_speed": None}
    )


def lines(this: ThisMachine) -> dict[str, float | None]:
    text = this.measurements.path.read_text().splitlines()
    return dict(json.loads(line) for line in text if line)


CALLS = {
    "mm": lambda: of(aten.mm.default, t(64, 64), t(64, 64)),
    "mm of a transposed": lambda: of(aten.mm.default, t(64, 32).t(), t(64, 16)),
    "expanded": lambda: of(aten.add.Tensor, t(8, 8), t(8).expand(8, 8)),
    "in place": lambda: of(aten.mul_.Tensor, t(8), 0.5),
    "list": lambda: of(aten._foreach_add_.List, [t(3), t(5)], [t(3), t(5)]),
    "embedding": lambda: of(aten.embedding.default, t(9, 4), t(100, dtype=torch.int64)),
    "embedding's gradient": lambda: of(
        aten.embedding_dense_backward.default, t(7, 4), t(7, dtype=torch.int64), 3, -1, False
    ),
    "nll": lambda: of(
        aten.nll_loss_forward.default, t(9, 4), t(9, dtype=torch.int64), None, 1, -100
    ),
    "masked": lambda: of(aten.masked_fill.Scalar, t(4), t(4, dtype=torch.bool), 1.0),
    "factory": lambda: of(aten.zeros.default, [4, 4], device=torch.device("meta")),
    "random": lambda: of(aten.bernoulli_.float, t(8), 0.5),
    "layer norm": lambda: of(aten.native_layer_norm.default, t(4, 8), [8], t(8), t(8), 1e-5),
    "view": lambda: of(aten.view.default, t(4, 4), [16]),
    "empty": lambda: of(aten.add.Tensor, t(0, 4), t(0, 4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_made_again_once(name: str, this: ThisMachine, monkeypatch: Any) -> None:
    work = CALLS[name]()
    seconds = this.op_seconds(work)
    assert 0 < seconds < 1 and list(lines(this).values()) == [seconds]
    monkeypatch.setattr(replay, "time_call", None)
    other = replace(this, measurements=MeasurementCache(this.measurements.path))
    assert this.op_seconds(work) == other.op_seconds(work) == seconds


def test_a_longer_call_takes_longer(this: ThisMachine) -> None:
    small, large = (this.op_seconds(of(aten.mm.default, t(n, n), t(n, n))) for n in (16, 256))
    assert small < large


def test_nobody_sees_a_trial(this: ThisMachine) -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            raise AssertionError(func)

    work, before = CALLS["random"](), torch.get_rng_state()
    with Seen(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert this.op_seconds(work) > 0
    assert torch.equal(before, torch.get_rng_state())


def test_a_call_that_cannot_be_made_again_costs_its_bytes(this: ThisMachine) -> None:
    generator = torch.Generator(device="cpu")
    work = of(aten.bernoulli_.float, t(1 << 20), 0.5, generator=generator)
    assert this.op_seconds(work) == this.launch_seconds + work.nbytes / this.memory_bytes_per_s
    assert list(lines(this).values()) == [None]


def test_a_call_that_raises_costs_its_bytes(this: ThisMachine) -> None:
    work = of(aten.index_select.default, t(4, 4), 0, t(2, dtype=torch.int64))
    key = work.key._replace(op="aten.mm.default")  # of these arguments mm makes nothing
    broken = Work("aten.mm.default", "copy", work.dtype, 0.0, work.nbytes, key)
    assert this.op_seconds(broken) == this.launch_seconds + work.nbytes / this.memory_bytes_per_s


def test_a_call_on_cold_tensors_takes_as_much_longer_as_of_them_are_cold(
    this: ThisMachine, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        replay, "time_call", lambda call, cold=False, device="cpu": 3.0 if cold else 1.0
    )
    monkeypatch.setattr(replay, "MAX_SECONDS", 1e99)
    work = CALLS["mm"]()
    slow = replace(this, memory_bytes_per_s=work.nbytes / 1.0)  # which bounds it, by 1 s
    for here, longest in ((replace(this, memory_bytes_per_s=1e-9), 2.0), (slow, 1.0)):
        took = [here.op_seconds(work, share) for share in (0.0, 0.25, 1.0)]
        assert took == [1.0, 1.0 + longest / 4, 1.0 + longest]
    assert sorted(lines(this).values()) == [1.0, 3.0]  # type: ignore[type-var]


def test_calls_on_cold_tensors_are_made_on_more_than_a_cache_holds(monkeypatch: Any) -> None:
    made = []
    monkeypatch.setattr(replay, "cache_bytes", lambda: 100 * 64 * 64 * 4)
    monkeypatch.setattr(replay, "find_op", lambda name: lambda x, y: made.append(x.data_ptr()))
    run = replay.replay_function(CALLS["mm"]().key, True)  # type: ignore[arg-type]
    for _ in range(200):
        run()
    assert len(set(made)) * 3 > 100 and len(made) == 200


def test_to_follow_an_op_outside_takes_what_it_takes_on_meta(
    this: ThisMachine, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        replay, "time_call", lambda call, cold=False, device="cpu": {"meta": 2.0}[device]
    )
    assert this.follow_seconds(CALLS["in place"]()) == this.host_seconds + 2.0


def test_what_would_take_too_much_memory_is_made_smaller(
    this: ThisMachine, monkeypatch: Any
) -> None:
    monkeypatch.setattr(replay, "MAX_BYTES", 1 << 20)
    rows, cut = 1 << 14, []
    monkeypatch.setattr(replay, "time_call", lambda call, cold: cut.append(call) or 1.0)
    work = of(aten.mm.default, t(64, rows).t(), t(64, 32))
    seconds = replace(this, launch_seconds=1e-9).op_seconds(work)
    (call,) = cut
    assert call.args[0].shape[0] < rows / 4 and call.args[0].strides[1] == call.args[0].shape[0]
    assert seconds == pytest.approx(rows / call.args[0].shape[0], rel=0.05)


def test_a_half_written_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text('["a", 1.0]\n["b", 2')
    assert MeasurementCache(path).get("a", lambda: 3.0) == 1.0
    assert MeasurementCache(path).get("b", lambda: 4.0) == 4.0
    assert MeasurementCache(path).get("b", lambda: 5.0) == 4.0


def test_numbers_live_without_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = MeasurementCache(tmp_path / "file" / "kept.jsonl")
    assert kept.get("a", lambda: 1.0) == kept.get("a", lambda: 2.0) == 1.0


def measured(rank: int, path: str) -> list[float | None]:
    kept = MeasurementCache(Path(path))
    return [kept.get(f"number {i}", lambda: float(rank)) for i in range(20)]


def test_ranks_that_measure_at_the_same_time_use_the_same_numbers(tmp_path: Path) -> None:
    found = pool(3).run(measured, str(tmp_path / "kept.jsonl"))
    assert found[0] == found[1] == found[2]


def priced(rank: int) -> bool:
    speeds, this = device_speeds("cpu"), machine("this")
    ranks = tuple(range(current().size))
    seconds = this.message_seconds("all_reduce", 1000, ranks)
    same = this.link(len(ranks)) == current().link("cpu")  # local copies included
    return same and seconds == speeds.latency + 1000 / speeds.bandwidth


def test_messages_cost_what_eager_boxing_takes_them_to_cost() -> None:
    assert pool(2).run(priced) == [True, True]
    assert device_speeds("cpu") == BUILT_IN["cpu"]  # of this process, which is alone


def test_ranks_of_several_hosts_send_messages(this: ThisMachine) -> None:
    two = replace(this, hosts=2).of(4)
    assert two.ranks_per_host == 2 and two.links((0, 2)) == ("between",)
    took = [two.message_seconds("all_reduce", 0, ranks) for ranks in ((0, 1), (0, 2))]
    assert took == [4e-6, 30e-6]  # by the tables that conftest.py keeps
    assert two.link(4).latency_s == 30e-6 and this.of(4).link(4).latency_s == 4e-6


def test_ranks_that_may_not_share_memory_send_messages(this: ThisMachine, monkeypatch: Any) -> None:
    monkeypatch.setenv("CONSISTENT_SHARED_MEMORY", "0")
    assert not this.shares_memory
    assert this.message_seconds("all_reduce", 0, (0, 1)) == 30e-6
