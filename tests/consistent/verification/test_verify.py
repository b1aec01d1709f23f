"""verify finds faults of the kinds that people make, says which they are, and nothing else."""

from __future__ import annotations

import linecache
import os
import threading
from functools import cache
from pathlib import Path

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor, nn
from torch.nn import functional as F

import consistent
from consistent.verification import start_method
from consistent.verification.compare import (
    Compared,
    Reference,
    differences,
    merge_ranks,
    until_first_choice,
)
from consistent.verification.held import TensorOnRanks
from consistent.verification.verify import REFERENCE_SECONDS, _compare
from consistent.verification.watch import Key, StepRecorder
from consistent.verification.worlds import StepSetting, run
from tests.launch import launch
from tests.ranks import ALL

from .faulty import BY_HAND, OURS, OVER_DTENSOR, Place, batch, by_hand, over_dtensor, step
from .models import PLANS, step_of

SECONDS = REFERENCE_SECONDS


@cache
def right() -> Reference:
    single, double = (run(step, StepSetting(double=double), SECONDS) for double in (False, True))
    assert not single.error and not double.error
    return Reference(merge_ranks(single.seen), merge_ranks(double.seen))


def found(fault: object, plan: str | None) -> Compared:
    world = StepSetting(2, plan)
    return _compare("", right(), run(fault, world, SECONDS), by_another=plan is None)


FAULTS = [
    pytest.param(fault, words, plan, id=f"{where}: {name}")
    for where, faults, plan in (
        ("ours", OURS, "data"),
        ("by hand", BY_HAND, None),
        ("DTensor", OVER_DTENSOR, None),
    )
    for k, (name, (fault, words)) in enumerate(faults.items())
    if ALL or k < 3
]


@pytest.mark.parametrize(("fault", "words", "plan"), FAULTS)
def test_a_fault_is_found_with_its_kind_and_line(fault: object, words: str, plan: str) -> None:
    made = found(fault, plan)
    assert made.wrong, made
    assert words in made.wrong[0].kind
    path, _, rest = made.wrong[0].where.partition(":")
    # Where the wrong value, or the parameter of a wrong gradient, first meets an op of the model.
    assert "self.changed(" in linecache.getline(path, int(rest.split()[0]))


def test_what_is_right_is_called_right() -> None:
    others = {"by hand": by_hand, "DTensor": over_dtensor}
    made = consistent.verify(step, ["data", "zero3", "tensor"], programs=others)
    assert made.ok, made
    assert all(each.compared > 20 for each in made.results)
    made.check()


MODELS = ["Llama", "GPT2", "Bert", "T5", "ViT", "GPTNeoX", "Mamba", "Mixtral"]
CASES = [(name, dtype) for name in MODELS for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), CASES if ALL else [("GPT2", torch.bfloat16)])
def test_models_raise_no_false_alarm(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("transformers", reason="the models are those of the transformers library")
    made = consistent.verify(step_of(name, dtype), PLANS if ALL else ["zero3"])
    assert made.ok, made
    assert all(each.compared > 50 for each in made.results)


def test_complex_numbers_are_compared_in_both_parts() -> None:
    key, value = Key("result", "fft", 0), torch.fft.fft(torch.arange(5.0))
    right = Reference({key: TensorOnRanks(key, "", None, "", {0: value})}, {})
    (wrong,) = differences(right, {key: TensorOnRanks(key, "", None, "", {0: value.conj()})})
    assert wrong.error == pytest.approx(2 * float(value.imag.abs().max()))
    assert not differences(right, {key: TensorOnRanks(key, "", None, "", {0: value.clone()})})


@pytest.mark.parametrize("end", ["finfo.min", "overflow"])
def test_where_the_dtype_ends_float64_does_not_decide(end: str) -> None:
    def held(dtype: torch.dtype, first: float = 1.0) -> dict[Key, TensorOnRanks]:
        last = torch.finfo(dtype).min if end == "finfo.min" else torch.tensor(3e38).to(dtype) * 2
        value = torch.tensor([first, float(last)], dtype=dtype)
        return {key: TensorOnRanks(key, "", None, "", {0: value})}

    key = Key("result", "masked_fill", 0)
    right = Reference(held(torch.float32), held(torch.float64))
    assert not differences(right, held(torch.float32))
    (wrong,) = differences(right, held(torch.float32, 1.1))
    assert wrong.error == pytest.approx(0.1) and wrong.allowed < 1e-4


def test_of_what_cancels_out_other_tensors_say_how_far_rounding_goes() -> None:
    keys = {name: Key("parameter gradient", name, 0) for name in ("bias", "weight")}

    def held(dtype: torch.dtype, **values: float) -> dict[Key, TensorOnRanks]:
        made = {name: torch.tensor([values.get(name, 0.1)], dtype=dtype) for name in keys}
        return {
            key: TensorOnRanks(key, "", None, "", {0: made[name]}) for name, key in keys.items()
        }

    right = Reference(held(torch.float32, bias=1e-13), held(torch.float64, bias=1e-19))
    assert not differences(right, held(torch.float32, bias=2e-11))
    (wrong,) = differences(right, held(torch.float32, bias=1e-5))
    assert wrong.key == keys["bias"] and wrong.allowed < 2e-6
    small = Reference(held(torch.float32, bias=1e-6), held(torch.float64, bias=1e-6))
    (wrong,) = differences(small, held(torch.float32, bias=2e-6))  # which does not cancel out
    assert wrong.allowed < 1e-10


class Routed(nn.Module):
    """Tokens go to the better of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, scores: Tensor) -> Tensor:
        best, expert = scores.topk(1)
        outputs = torch.stack([each(scores) for each in self.experts], 1)
        return (best[..., None] * torch.take_along_dim(outputs, expert[..., None], 1)).sum()


SCORES = torch.tensor([[1.0, 1.0 + 2e-7], [0.5, 0.25]])


def routed(place: Place, scores: Tensor = SCORES) -> Tensor:
    torch.manual_seed(0)
    return place(Routed())(scores)


def by_rounding(place: Place) -> Tensor:
    return routed(place, SCORES + torch.tensor([[4e-7, 0.0], [0.0, 0.0]]))


def by_a_fault(place: Place) -> Tensor:
    return routed(place, SCORES.flip(1))


def test_what_follows_a_choice_that_rounding_made_is_not_compared() -> None:
    others = {"rounding": by_rounding, "fault": by_a_fault}
    made = consistent.verify(routed, programs=others)
    rounding, fault = made.results
    assert rounding.ok and rounding.left > 2 and "topk (" in rounding.choice, made
    assert "chose otherwise between values that rounding makes equal" in str(made)
    assert fault.wrong and "topk" in str(fault)


class Best(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return scores.topk(1)[0].sum()


def best(place: Place) -> Tensor:
    return place(Best())(SCORES)


def best_over_dtensor(place: Place) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return place(Best())(distribute_tensor(SCORES, mesh, [Shard(0)])).full_tensor()


def test_places_in_a_dtensor_are_those_of_all_of_it() -> None:
    others = {"DTensor": best_over_dtensor}
    made = consistent.verify(best, programs=others)
    assert made.ok and made.results[0].compared > 2, made


def test_places_that_do_not_have_the_values_are_wrong() -> None:
    x = torch.tensor([3.0, 1.0, 2.0])
    found = []
    for places in (torch.tensor([0, 2]), torch.tensor([0, 1])):  # the second: those of a shard
        watch = StepRecorder(lambda model: model)
        watch.place(nn.Identity())
        watch.record_op(torch.topk, (x, 2), {}, torch.return_types.topk((x.topk(2)[0], places)))
        found.append(merge_ranks([watch.seen]))
    right, other = Reference(found[0], {}), found[1]
    (wrong,) = differences(right, until_first_choice(right, other)[0])
    assert wrong.key.name == "topk, at its places"


def dropping(place: Place) -> torch.Tensor:
    torch.manual_seed(0)
    model = place(nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.Linear(12, 4)))
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def test_random_numbers_are_held_against_one_rank_under_the_plan() -> None:
    made = consistent.verify(dropping, ["data"])
    assert made.ok and made.draws and "random numbers" in str(made)


def raising(place: Place) -> None:
    place(nn.Linear(2, 2))
    raise ValueError("of the step itself")


def test_what_raises_on_one_process_is_raised() -> None:
    with pytest.raises(RuntimeError, match="of the step itself"):
        consistent.verify(raising, ["data"])


def hanging(place: Place) -> None:
    step(place)
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        threading.Event().wait()


def test_what_hangs_or_raises_is_said_and_the_page_shows_it(tmp_path: Path) -> None:
    made = consistent.verify(step, programs={"<hangs>": hanging, "raises": raising}, seconds=1)
    hangs, raises = made.results
    assert "not ended after" in hangs.error and not made.ok
    assert "of the step itself" in raises.error
    text = made.save(tmp_path / "page.html").read_text()
    assert "&lt;hangs&gt;" in text and "of the step itself" in text
    with pytest.raises(AssertionError, match="of the step itself"):
        made.check()


def test_where_forks_cannot_run_backward_ranks_are_spawned(monkeypatch: MonkeyPatch) -> None:
    """As after a backward on a torch built for CUDA; a step that can't be imported is refused."""
    monkeypatch.setattr(start_method, "_try_backward", lambda: os._exit(1))
    ran = run(best, StepSetting(2, "data"), SECONDS)
    assert not ran.error and len(ran.seen) == 2 and all(ran.seen), ran
    with pytest.raises(RuntimeError, match="(?s)lambda.*top level of a module"):
        run(lambda place: best(place), StepSetting(), SECONDS)
    monkeypatch.setattr(best, "__module__", "__main__")
    monkeypatch.delattr("__main__.__file__", raising=False)
    with pytest.raises(RuntimeError, match="notebook"):
        run(best, StepSetting(), SECONDS)


COMMAND = """
import sys
from consistent.command.main import main

sys.exit(main(sys.argv[1:]))
"""

PROGRAM = """
import consistent
from tests.consistent.verification.faulty import OURS, step as right
{step}
"""


@pytest.mark.parametrize(
    ("line", "status"), [("step = right", 0), ("step = OURS['wrong sign'][0]", 1)]
)
def test_the_command_ends_with_what_it_found(line: str, status: int, tmp_path: Path) -> None:
    command, path = tmp_path / "command.py", tmp_path / "program.py"
    command.write_text(COMMAND)
    path.write_text(PROGRAM.format(step=line))
    ended = launch(command, "verify", "--plan", "data", str(path), ranks=1)
    assert ended.status == status, ended.errors
    assert ("the wrong sign" in ended.printed[0]) == bool(status)
