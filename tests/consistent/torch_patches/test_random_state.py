"""What seeds, saves, copies and restores torch's random state does so for global tensors, too."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import consistent
from consistent import B, Placement, S
from consistent.forms.random import generator
from tests.ranks import pool

ONE = Placement("cpu", [0])


def _draw(placement: Placement = ONE, sbp: Any = B) -> torch.Tensor:
    return consistent.rand(7, placement=placement, sbp=sbp).full()


def _saved(state: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save({"rng": [state]}, file)
    file.seek(0)
    return torch.load(file)["rng"][0]


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda state: state,
    "clone": lambda state: state.clone(),
    "torch.save": _saved,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "deepcopy": copy.deepcopy,
    "numpy": lambda state: torch.from_numpy(state.numpy().copy()),
    "bytes": lambda state: torch.frombuffer(bytearray(state.numpy().tobytes()), dtype=torch.uint8),
    "other generator": lambda state: torch.Generator().set_state(state).get_state(),
    "clone_state": lambda state: torch.default_generator.clone_state().get_state(),
    "list": lambda state: torch.ByteTensor(state.tolist()),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_state_is_the_state(name: str) -> None:
    torch.manual_seed(3)
    first = _draw()
    state = COPIES[name](torch.get_rng_state())
    second, plain = _draw(), torch.rand(3)
    torch.rand(700)
    torch.set_rng_state(state)
    assert torch.equal(_draw(), second) and torch.equal(torch.rand(3), plain)
    assert not torch.equal(first, second)


SEEDS: dict[str, Callable[[int], Any]] = {
    "torch.manual_seed": torch.manual_seed,
    "torch.random.manual_seed": torch.random.manual_seed,
    "default_generator.manual_seed": torch.default_generator.manual_seed,
    "random.default_generator.manual_seed": lambda n: torch.random.default_generator.manual_seed(n),
    "state of a generator": lambda n: torch.set_rng_state(
        torch.Generator().manual_seed(n).get_state()
    ),
}


@pytest.mark.parametrize("name", SEEDS)
def test_every_way_to_seed_starts_over(name: str) -> None:
    torch.manual_seed(3)
    wanted = _draw(), _draw()
    for _ in range(2):
        SEEDS[name](3)
        assert torch.equal(_draw(), wanted[0]) and torch.equal(_draw(), wanted[1])
    SEEDS[name](4)
    assert not torch.equal(_draw(), wanted[0])


@pytest.mark.parametrize("seed", [torch.seed, torch.default_generator.seed, torch.random.seed])
def test_a_seed_of_torchs_own_choice_is_taken(seed: Callable[[], int]) -> None:
    torch.manual_seed(3)
    before = _draw()
    chosen = seed()
    assert generator.get_state() == (chosen, 0) and not torch.equal(_draw(), before)


def test_fork_rng_puts_the_state_back() -> None:
    torch.manual_seed(3)
    _draw()
    with torch.random.fork_rng():
        inside = _draw()
        torch.manual_seed(9)
        _draw()
    assert torch.equal(_draw(), inside)


def test_states_without_global_random_ops_are_torchs_to_the_bit() -> None:
    torch.manual_seed(3)
    expected = torch.Generator().manual_seed(3)
    assert torch.equal(torch.get_rng_state(), expected.get_state())
    torch.rand(5)
    torch.rand(5, generator=expected)
    assert torch.equal(torch.get_rng_state(), expected.get_state())


def test_a_large_count_is_kept() -> None:
    torch.manual_seed(3)
    for count in (1, (1 << 31) - 1, 1 << 31, (1 << 40) + 5):
        generator.set_draw_count(torch.default_generator, count)
        assert generator.stored_draw_count(torch.get_rng_state()) == count


def _checkpointed(rank: int, reentrant: bool) -> bool:
    x = consistent.ones(64, placement=Placement("cpu", [0, 1]), sbp=S(0), requires_grad=True)
    torch.manual_seed(1)
    _draw(x.placement, S(0))
    y = checkpoint(lambda z: F.dropout(F.dropout(z, 0.5), 0.5), x, use_reentrant=reentrant)
    state = generator.get_state()
    y.sum().backward()
    same = torch.equal(x.grad.full(), y.detach().full())
    return same and generator.get_state() == state and state.counter == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_repeats_its_masks_and_leaves_the_state(reentrant: bool) -> None:
    assert all(pool(2).run(_checkpointed, reentrant))


def _with_plain_draws(rank: int) -> list[torch.Tensor]:
    """Plain numbers that one rank alone draws do not set the ranks apart."""
    placement = Placement("cpu", [0, 1, 2])
    torch.manual_seed(11)
    found = []
    for sbp in (B, S(0)):
        if rank == 1:
            torch.rand(5)
        with torch.random.fork_rng(enabled=rank == 2):
            torch.randn(rank + 1)
        found.append(_draw(placement, sbp))
    return found


def test_a_rank_that_draws_plain_numbers_draws_the_same_global_ones() -> None:
    first, *others = pool(3).run(_with_plain_draws)
    assert all(torch.equal(a, b) for found in others for a, b in zip(found, first, strict=True))


def _seeded_apart(rank: int) -> tuple[torch.Tensor, str]:
    placement = Placement("cpu", [0, 1])
    torch.manual_seed(rank)
    with consistent.plain_may_differ():
        x = consistent.rand(6, placement=placement, sbp=S(0)).full()
    with (
        consistent.check_mode(),
        pytest.raises(RuntimeError, match="different random numbers") as e,
    ):
        consistent.rand(6, placement=placement, sbp=B)
    return x, str(e.value)


def test_ranks_that_seed_apart_draw_their_own_pieces_and_check_mode_says_so() -> None:
    whole = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        whole.append(consistent.rand(6, placement=ONE, sbp=B).full())
    for x, message in pool(2).run(_seeded_apart):
        assert torch.equal(x, torch.cat([whole[0][:3], whole[1][3:]]))
        assert "rank 0: seed 0, op 1, rank 1: seed 1, op 1" in message
