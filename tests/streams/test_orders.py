"""What training steps ask of GPUs can neither hang nor read what is not there yet: all ranks ask
for the same collectives in one order, nothing waits in a circle, and memory outlives all its uses.

The ranks are of gloo, and the code believes that they have GPUs (`stand_ins.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("transformers", reason="the models are those of the transformers library")

from mirrored.transports.side_stream import SideStreamMessage
from tests.models.messages import PLANS
from tests.ranks import ALL, pool
from tests.streams.noted import Event
from tests.streams.orders import SENT, faults
from tests.streams.steps import STEPS, events, piped

MODELS = (
    "Llama", "GPT2", "Mixtral", "Mamba", "Bert", "T5", "Whisper", "ViT", "Swin", "CLIP", "Bart",
    "Transformer",
)  # fmt: skip
FEW = MODELS if ALL else MODELS[:1]
STAGES = ("data", "zero1", "zero2", "zero3", "tensor")
# What plans send is the same through memory that GPUs of a host share, in calls of another kind.
BY_PEERS = PLANS if ALL else ("data", "zero3 by module", "tensor")
Logs = list[list[Event]]


@pytest.fixture(scope="module")
def checked() -> Iterator[Counter[str]]:
    """What the tests have checked on all ranks; `pytest -s` shows it when they have ended."""
    counts: Counter[str] = Counter()
    yield counts
    print("\nchecked:", ", ".join(f"{what} {count:,}" for what, count in counts.items()))


def check(checked: Counter[str], logs: Logs, steps: int) -> None:
    """Counts what ``steps`` steps asked for on each rank, of which nothing may be wrong."""
    kinds, found = Counter(event.kind for log in logs for event in log), faults(logs)
    checked["steps"] += steps
    checked["collectives"] += sum(kinds[kind] for kind in SENT)
    checked["waits"] += sum(kinds[kind] for kind in ("wait", "join", "sync"))
    checked["pieces of memory"] += kinds["made"]
    checked["recorded on another stream"] += kinds["held"]
    checked["faults"] += len(found)
    assert not found


def _all_plans(rank: int, name: str, how: str, peers: bool) -> list[list[Event]]:
    return [events(rank, name, plan, how, peers) for plan in (BY_PEERS if peers else PLANS)]


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("peers", [False, True], ids=["messages", "peers"])
def test_steps_are_in_order(name: str, how: str, peers: bool, checked: Counter[str]) -> None:
    by_rank = pool(2).run(_all_plans, name, how, peers, timeout=300)
    for logs in zip(*by_rank, strict=True):
        check(checked, logs, STEPS[how])
        sent = {event.kind for event in logs[0]} & {*SENT, "wait"}
        assert {"barrier" if peers else "start", "meet"} <= sent, "nothing was noted"


@pytest.mark.parametrize("name", MODELS if ALL else ["GPT2"])
@pytest.mark.parametrize("plan", STAGES if ALL else STAGES[-2:])
def test_pipelined_steps_are_in_order(name: str, plan: str, checked: Counter[str]) -> None:
    logs = pool(4).run(piped, name, plan, timeout=120)
    check(checked, logs, STEPS["eager"])
    streams = {event.what[0] for log in logs for event in log if event.kind == "start"}
    assert streams >= {"nccl (0, 1)", "nccl (2, 3)"}


# -- what is planted is found ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def logs() -> Logs:
    """Of a step whose gradients are summed while backward goes on."""
    return pool(2).run(events, "Transformer", "data", "eager")


def test_orders_that_differ_on_a_rank_are_found(logs: Logs) -> None:
    assert not faults(logs)
    first, second = [e.what for e in logs[1] if e.kind == "start"][:2]
    comm = first[0]
    swapped = {first: (comm, 0, second[2]), second: (comm, 1, first[2])}
    mine = [e._replace(what=swapped.get(e.what, e.what)) for e in logs[1]]
    assert faults([logs[0], mine]) == [f"{comm}, call 0: ranks 0 and 1 do not make the same"]


def test_a_bucket_that_is_freed_early_is_found(logs: Logs) -> None:
    log = list(logs[0])
    started = next(e for e in log if e.kind == "start" and "allreduce" in e.what[2])
    freed = next(e for e in log if e.kind == "freed" and set(e.writes) <= set(started.writes))
    log.remove(freed)
    log.insert(log.index(started) + 1, freed)
    assert any("neither recorded there nor waited for" in fault for fault in faults([log, logs[1]]))


def _not_waiting(self: Any, made: Any = ()) -> None:
    pass


def _not_recording(self: Any, made: Any = ()) -> None:
    from mirrored.transports import side_stream

    side_stream.cuda.current_stream(self._device).wait_event(self._done_event)


def _with_join(rank: int, join: Callable[..., None]) -> list[Event]:
    with patch.object(SideStreamMessage, "join", join):
        return events(rank, "Transformer", "zero3 by module", "compiled")


def test_a_wait_that_is_left_out_is_found() -> None:
    found = faults(pool(2).run(_with_join, _not_waiting))
    assert any("does not wait for" in fault for fault in found)


def test_memory_that_is_not_recorded_on_the_stream_that_uses_it_is_found() -> None:
    found = faults(pool(2).run(_with_join, _not_recording))
    assert found and all("goes back to side 0 while" in fault for fault in found)


def _two(first: str, second: str, waits: bool) -> list[Event]:
    """Two collectives, each on a stream of its own; the second may wait for the first."""
    one, other = (first, 0, ""), (second, 0, "")
    join = [Event("join", f"for {second}", one)] if waits else []
    return [Event("start", f"for {first}", one), *join, Event("start", f"for {second}", other)]


@pytest.mark.parametrize("waits", [True, False])
def test_a_circle_of_two_communicators_on_two_streams_is_found(waits: bool) -> None:
    rows, columns = "rows", "columns"
    found = faults([_two(rows, columns, waits), _two(columns, rows, waits)])
    assert ["in a circle" in fault for fault in found] == [True] * (1 + waits)
    assert not faults([_two(rows, columns, waits)] * 2)
