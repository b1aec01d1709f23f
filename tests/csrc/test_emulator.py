"""The emulator that runs kernels on the CPU: what it lets a kernel see, and what it reports."""

from __future__ import annotations

import pytest

from tests.csrc.emulating import EMULATOR, MEMORY, THREADS, build, needs_emulator, outcome

PROGRAM = EMULATOR / "emulator_test.cu"

# The faults, numbered as in the program, and what finds each.
FAULTS = [
    (MEMORY, "threads wait at different __syncthreads"),
    (MEMORY, "95 wait at a __syncthreads, 0 for lanes of their warp, 1 have ended"),
    (MEMORY, "a lane is not in its own mask"),
    (MEMORY, "a lane reads one that is not in the mask"),
    (MEMORY, "lanes of a mask wait at different places or for different masks"),
    (MEMORY, "index 96 out of bounds"),
    (MEMORY, "heap-buffer-overflow"),
    (MEMORY, "misaligned address"),
    (THREADS, "data race"),
    (THREADS, "data race"),
]


@needs_emulator
@pytest.mark.parametrize("sanitizer", [MEMORY, THREADS])
def test_kernels_see_what_they_would_on_a_gpu(sanitizer):
    assert outcome(build((PROGRAM,), sanitizer)) == (0, "the emulator is right")


@needs_emulator
@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_fault_is_reported(number):
    sanitizer, words = FAULTS[number]
    status, printed = outcome(build((PROGRAM,), sanitizer), number)
    assert status != 0 and words in printed, printed
