"""Plans done on shards: box(src -> dst) gives what scatter(dst) would."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistent.boxing.plan import plan
from consistent.boxing.steps import Exchange
from consistent.movement.run import run
from consistent.movement.world import local_shape, my_coordinate
from consistent.spec import B, P, Placement, S, TensorSpec
from consistent.spec.tracer import Tracer
from mirrored.transports.counting import counting
from tests.each_of import each_of
from tests.ranks import SIZES, pool, simulate
from tests.reference import gather, in_grid_order, scatter, shard_at, whole_numbers
from tests.strategies import GRIDS, cut_pairs, spec_pairs

ENTRIES = (B, P, S(0), S(1))
PAIRS = [(a, b) for a in ENTRIES for b in ENTRIES]


def of(sbp, shape=(7, 5), placement=None, dtype=torch.float64) -> TensorSpec:
    return TensorSpec.of(placement or Placement("cpu", [0, 1, 2]), sbp, shape, dtype)


def boxed(rank: int, shards: list[torch.Tensor], src: TensorSpec, dst: TensorSpec) -> torch.Tensor:
    return run(shard_at(shards, src, rank), src, dst)


def check_boxing(
    full: torch.Tensor, src: TensorSpec, dst: TensorSpec, by_rank: list[torch.Tensor]
) -> None:
    results = in_grid_order(by_rank, dst)
    for result, wanted in zip(results, scatter(full, dst), strict=True):
        assert result.shape == wanted.shape and result.dtype == wanted.dtype
        assert result.is_contiguous()
        if not any(entry.is_partial for entry in dst.sbp):
            assert torch.equal(result, wanted)
    assert torch.equal(gather(results, dst), full)


def try_pair(src: TensorSpec, dst: TensorSpec, world: int | None = None) -> None:
    full = whole_numbers(src.shape, src.dtype)
    shards = scatter(full, src)
    check_boxing(full, src, dst, simulate(boxed, world or src.placement.size, shards, src, dst))


@each_of(("src", "dst"), PAIRS)
@each_of("shape", [(6, 3), (7, 5), (2, 4), (0, 5)])
def test_every_pair_on_one_axis(src, dst, shape):
    try_pair(of(src, shape), of(dst, shape))


@settings(max_examples=250, deadline=None)
@given(spec_pairs(axes=(2, 3)))
def test_any_pair_on_two_and_three_axes(pair):
    try_pair(*pair)


@settings(max_examples=40, deadline=None)
@given(spec_pairs(max_ranks=8, axes=(2, 3)))
def test_any_pair_on_up_to_eight_ranks(pair):
    try_pair(*pair)


@settings(max_examples=250, deadline=None)
@given(cut_pairs())
def test_any_pair_of_cuts(pair):
    try_pair(*pair)


NESTED = [
    ((S(0), S(0), S(0)), (B, B, B)),
    ((B, B, B), (S(0), S(0), S(0))),
    ((S(0), S(0), S(0)), (S(1), S(1), S(1))),
    ((S(0), S(0), S(0)), (B, S(0), S(0))),
    ((P, P, P), (S(0), S(0), S(0))),
    ((S(0), S(0), S(0)), (P, P, P)),
    ((S(0), P, S(0)), (S(0), S(0), B)),
]


@each_of(("src", "dst"), NESTED)
@each_of("n", [16, 11, 3])
def test_one_dim_split_by_two_and_three_axes(src, dst, n):
    cube = Placement("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    try_pair(of(src, (n, 3), cube), of(dst, (n, 3), cube))


@each_of("dtype", [torch.int64, torch.int16, torch.bfloat16, torch.complex64])
@each_of(("src", "dst"), PAIRS)
def test_every_dtype(src, dst, dtype):
    try_pair(of(src, dtype=dtype), of(dst, dtype=dtype))


@each_of(("src", "dst"), [pair for pair in PAIRS if P not in pair])
def test_bool_splits_and_broadcasts(src, dst):
    try_pair(of(src, dtype=torch.bool), of(dst, dtype=torch.bool))


@each_of(("src", "dst"), [(B, P), (P, B), (B, B), (P, P)])
def test_tensor_without_dims(src, dst):
    try_pair(of(src, ()), of(dst, ()))


def test_order_of_ranks_is_the_order_of_pieces():
    placement = Placement("cpu", [2, 0, 1])
    src, dst = of(S(0), (7,), placement), of(B, (7,), placement)
    full = torch.arange(7.0, dtype=torch.float64)
    shards = simulate(boxed, 3, scatter(full, dst), dst, src)
    assert [x.tolist() for x in shards] == [[3, 4], [5, 6], [0, 1, 2]]
    try_pair(src, dst)


# -- what the result is ----------------------------------------------------------------------------


def write_result(rank: int, shards, src, dst) -> bool:
    x = shard_at(shards, src, rank).clone()
    before = x.clone()
    y = run(x, src, dst)
    y.fill_(99)
    return torch.equal(x, before)


@each_of("inference", [False, True])
@each_of(("src", "dst"), [pair for pair in PAIRS if pair[0] is not pair[1]])
@each_of("n", [1, 3])
def test_writing_to_the_result_leaves_the_source(src, dst, n, inference):
    placement = Placement("cpu", range(n))
    with torch.inference_mode(inference):
        src, dst = of(src, placement=placement), of(dst, placement=placement)
        assert all(simulate(write_result, n, scatter(whole_numbers((7, 5)), src), src, dst))


def test_src_to_itself_returns_the_input():
    x = torch.zeros(7, 5, dtype=torch.float64)
    assert run(x, of(B), of(B)) is x


def permuted(rank: int, shards, src, dst) -> torch.Tensor:
    x = shard_at(shards, src, rank)
    return run(x.t().contiguous().t(), src, dst)


@each_of(("src", "dst"), [pair for pair in PAIRS if pair[0] is not pair[1]])
def test_input_need_not_be_contiguous(src, dst):
    full = whole_numbers((7, 5))
    check_boxing(
        full, of(src), of(dst), simulate(permuted, 3, scatter(full, of(src)), of(src), of(dst))
    )


def conjugated(rank: int, shards, src, dst) -> torch.Tensor:
    return run(shard_at(shards, src, rank).conj(), src, dst)


@each_of(("src", "dst"), [pair for pair in PAIRS if pair[0] is not pair[1]])
def test_lazy_conjugation_is_carried_out(src, dst):
    full = whole_numbers((7, 5), torch.complex64) * (2 + 1j)
    src, dst = of(src, dtype=full.dtype), of(dst, dtype=full.dtype)
    results = simulate(conjugated, 3, scatter(full, src), src, dst)
    assert not any(x.is_conj() for x in results)
    assert torch.equal(gather(results, dst), full.conj().resolve_conj())


def reduced(rank: int, shards, src, dst) -> torch.Tensor:
    return run(shards[rank], src, dst)


def test_reducing_gives_the_same_bits_on_every_rank():
    shards = [torch.randn(50, dtype=torch.float32) * 10**k for k in range(3)]
    src = of(P, (50,), dtype=torch.float32)
    whole = simulate(reduced, 3, shards, src, src.with_sbp((B,)))
    assert torch.equal(whole[0], whole[1]) and torch.equal(whole[0], whole[2])
    parts = simulate(reduced, 3, shards, src, src.with_sbp((S(0),)))
    assert torch.equal(torch.cat(parts), whole[0])


def keeps_no_graph(rank: int) -> bool:
    x = torch.ones(7, 5, dtype=torch.float64, requires_grad=True)
    return run(x, of(B), of(S(0))).requires_grad or run(x, of(P), of(B)).requires_grad


def test_run_has_no_autograd():
    assert simulate(keeps_no_graph, 3) == [False] * 3


# -- bytes -----------------------------------------------------------------------------------------


def counted(rank: int, shards, src, dst) -> list[int]:
    with counting() as log:
        run(shard_at(shards, src, rank), src, dst)
    return [call.bytes for call in log.calls]


def _sends(move, placement: Placement) -> bool:
    if isinstance(move, Exchange):
        return move.total > 0
    return placement.shape[move.axis] > 1


@settings(max_examples=150, deadline=None)
@given(st.one_of(spec_pairs(), cut_pairs()))
def test_the_busiest_rank_sends_what_the_plan_says(pair):
    src, dst = pair
    sent = simulate(counted, src.placement.size, scatter(whole_numbers(src.shape), src), src, dst)
    local = ("slice", "keep_first", "keep", "pad")
    moves = [m for m in plan(src, dst) if m.kind not in local and _sends(m, src.placement)]
    assert [max(calls) for calls in zip(*sent, strict=True)] == [m.nbytes for m in moves]


# -- ranks outside, and where this rank is ---------------------------------------------------------


def outside(rank: int, src, dst) -> tuple:
    with counting() as log:
        shape = local_shape(src)
        x = torch.zeros(
            shape, dtype=src.dtype, device="meta" if my_coordinate(src.placement) is None else "cpu"
        )
        y = run(x, src, dst)
    return y.device.type, tuple(y.shape), len(log.calls)


def test_rank_outside_gets_a_meta_tensor_and_sends_nothing():
    placement = Placement("cpu", [1, 2])
    results = simulate(outside, 3, of(S(0), placement=placement), of(S(1), placement=placement))
    assert results == [("meta", (7, 3), 0), ("cpu", (7, 3), 1), ("cpu", (7, 2), 1)]


def where(rank: int, placement) -> tuple | None:
    return my_coordinate(placement)


def test_simulated_ranks_share_a_placement_and_know_their_own_place():
    placement = Placement("cpu", [[3, 1], [2, 0]])
    for _ in range(2):
        assert simulate(where, 5, placement) == [(1, 1), (0, 1), (1, 0), (0, 0), None]


def observed(rank: int, placement: Placement) -> None:
    src, dst = of(S(0), placement=placement), of(B, placement=placement)
    run(torch.zeros(local_shape(src), dtype=src.dtype), src, dst)


def test_tracers_see_the_moves():
    seen = []
    with Tracer(on_boxing_begin=lambda *boxing: seen.append(boxing)).tracing():
        simulate(observed, 1, Placement("cpu", [0]))
    ((src, dst, moves),) = seen
    assert (src.sbp, dst.sbp, [m.kind for m in moves]) == ((S(0),), (B,), ["all_gather"])


# -- real processes --------------------------------------------------------------------------------


def sample(n: int, count: int) -> list[tuple[TensorSpec, TensorSpec]]:
    """Pairs of specs over ``n`` ranks: every pair on one axis, then any, drawn at random."""
    draw = random.Random(n)
    line = Placement("cpu", range(n))
    cases = [(of(a, placement=line), of(b, placement=line)) for a, b in PAIRS]
    for _ in range(count):
        grid = draw.choice([g for g in GRIDS if torch.Size(g).numel() == n])
        ranks = torch.tensor(draw.sample(range(n), n)).reshape(grid).tolist()
        placement = Placement("cpu", ranks)
        shape = tuple(draw.choice([0, 1, 3, 5, 8]) for _ in range(draw.choice([1, 2, 3])))
        entries = [B, P, *(S(dim) for dim in range(len(shape)))]
        dtype = draw.choice([torch.float64, torch.float32, torch.int64, torch.complex64])
        src, dst = (
            of(tuple(draw.choices(entries, k=len(grid))), shape, placement, dtype) for _ in "ab"
        )
        cases.append((src, dst))
    return cases


def sample_of_cuts(n: int) -> list[tuple[TensorSpec, TensorSpec]]:
    """Each pair of ways to cut a dim over ``n`` ranks, and to B, P and the other dim."""
    line, rows = Placement("cpu", range(n)), 2 * n * 3
    sizes = (*range(1, n), rows - n * (n - 1) // 2)
    cuts = [S(0, blocks=1), S(0, blocks=2), S(0, cut="zigzag"), S(0, sizes=sizes), S(0, of=3),
            S(0, cut="zigzag", of=(rows - 1, 1)), S(0)]  # fmt: skip
    pairs = list(itertools.permutations(cuts, 2))
    pairs += [pair for cut in cuts for to in (B, P, S(1)) for pair in ((cut, to), (to, cut))]
    return [(of(a, (rows, 5), line), of(b, (rows, 5), line)) for a, b in pairs]


def boxed_bits(rank: int, dtype: torch.dtype, cases) -> bool:
    """Whether shards of ``dtype`` that are boxed have the bits of integers that are."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]

    def made(kind: torch.dtype, pair) -> torch.Tensor:
        a, b = (of(s.sbp, s.shape, s.placement, kind) for s in pair)
        return boxed(rank, scatter(whole_numbers(a.shape, integer).view(kind), a), a, b)

    return all(torch.equal(made(dtype, c).view(integer), made(integer, c)) for c in cases)


# Torch lacks kernels of these: no index_copy_ of any, no fill of the last.
@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
     torch.float8_e8m0fnu],
    ids=str,
)  # fmt: skip
def test_dtypes_without_kernels_are_moved_between_all_cuts(dtype):
    pairs = [(a, b) for a, b in sample_of_cuts(3) if P not in (*a.sbp, *b.sbp)]
    assert all(pool(3).run(boxed_bits, dtype, pairs))


def boxed_all(rank: int, cases) -> list[torch.Tensor]:
    return [boxed(rank, scatter(whole_numbers(a.shape, a.dtype), a), a, b) for a, b in cases]


@pytest.mark.parametrize("n", SIZES)
def test_gloo_ranks_agree_with_the_reference(n):
    cases = sample(n, 60) + sample_of_cuts(n)
    by_rank = pool(n).run(boxed_all, cases)
    for k, (src, dst) in enumerate(cases):
        check_boxing(
            whole_numbers(src.shape, src.dtype), src, dst, [results[k] for results in by_rank]
        )
