import math

import pytest

from consistent import placement
from consistent.layout_problem.solve import DoesNotFitInMemory, solve

from .graphs import least_seconds, least_within, random_problem, sizes

pytest.importorskip("scipy")

PAIR = placement("cpu", ranks=[0, 1])
GRID = placement("cpu", ranks=[[0, 1], [2, 3]])
MOST = 300_000  # solutions to try


def problems(where, counts, most, wanted):
    """So many random problems that can be tried out."""
    seed = 0
    while wanted:
        problem = random_problem(seed, where, counts[seed % len(counts)])
        seed += 1
        if math.prod(sizes(problem)) <= most:
            wanted -= 1
            yield problem


def test_fifty_random_graphs_are_solved_as_by_trying_everything():
    split = 0
    for problem in problems(PAIR, range(5, 10), MOST, 50):
        solution = solve(problem)
        seconds, _ = problem.cost(solution)
        assert seconds == pytest.approx(least_seconds(problem), rel=1e-7)
        pairs = zip(problem.nodes, solution, strict=True)
        split += any(e.is_split for n, i in pairs for s in n.options[i].outs for e in s)
    assert split > 25


def test_two_axes_are_solved_as_by_trying_everything():
    for problem in problems(GRID, [3, 4], MOST, 6):
        seconds, _ = problem.cost(solve(problem))
        assert seconds == pytest.approx(least_seconds(problem), rel=1e-7)


def test_a_bound_of_memory_is_kept_as_by_trying_everything():
    tried = 0
    for problem in problems(PAIR, [2, 3], 60, 12):
        if math.prod(len(node.options) for node in problem.nodes) > 3000:
            continue
        tried += 1
        _, free = problem.cost(solve(problem))
        for share in (0.9, 0.7, 0.5):
            memory = int(free * share)
            least = least_within(problem, memory)
            if least is None:
                with pytest.raises(DoesNotFitInMemory):
                    solve(problem, memory)
            else:
                seconds, nbytes = problem.cost(solve(problem, memory))
                assert nbytes <= memory
                assert seconds == pytest.approx(least, rel=1e-7)
    assert tried > 3


def test_the_same_problem_has_the_same_solution():
    first, second = (random_problem(3, PAIR, 7) for _ in range(2))
    assert solve(first) == solve(second)
