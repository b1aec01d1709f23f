"""Every kernel, run on the CPU under sanitizers and compared with its twin there."""

from __future__ import annotations

import pytest

from tests.csrc.compiling import CXX, NVCC, ROOT, run
from tests.csrc.emulating import (
    EXACT,
    KERNELS,
    MEMORY,
    THREADS,
    build_kernels,
    executed,
    global_functions,
    instances,
    kernels_object,
    needs_emulator,
    outcome,
)
from tests.ranks import ALL

# The cases of a program; all of those of random numbers take a minute.
CASES = "all" if ALL else "few"


def waits(name: str) -> bool:
    """Whether threads of the kernels share memory or wait for each other."""
    words = "block.cuh", "__shared__", "__sync", "_sync("
    return any(word in KERNELS[name].read_text() for word in words)


@needs_emulator
@pytest.mark.parametrize("sanitizer", [MEMORY, EXACT] if ALL else [MEMORY])
@pytest.mark.parametrize("name", KERNELS)
def test_every_instance_runs_clean_and_agrees_with_the_cpu(name, sanitizer, tmp_path):
    program, listed = build_kernels(name, sanitizer), tmp_path / "kernels"
    status, printed = outcome(program, CASES, EMULATED_KERNELS=listed)
    assert status == 0, printed
    compiled = instances(name, kernels_object(name, sanitizer))
    for function in global_functions(name):
        assert any(f"::{function}" in symbol for symbol in compiled), function
    assert executed(program, listed) == compiled, f"csrc/tests/{name}_test.cu lacks cases"


@needs_emulator
@pytest.mark.parametrize("name", [name for name in KERNELS if ALL or waits(name)])
def test_no_threads_of_a_block_race(name, tmp_path):
    program, listed = build_kernels(name, THREADS), tmp_path / "kernels"
    status, printed = outcome(program, "few" if ALL else "once", EMULATED_KERNELS=listed)
    assert status == 0, printed
    assert executed(program, listed) == instances(name, kernels_object(name, THREADS))


@needs_emulator
@pytest.mark.parametrize("kilobytes", [64, 99, 163] if ALL else [64])  # sm_75; 86, 89, 120; 80
def test_rows_fit_in_the_shared_memory_of_smaller_gpus(kilobytes):
    program = build_kernels("reduce_shards", MEMORY)
    cases = "few" if ALL else "once"
    status, printed = outcome(program, cases, EMULATED_SHARED_BYTES=kilobytes << 10)
    assert status == 0, printed


@pytest.mark.skipif(
    NVCC is None or CXX is None or not ALL, reason="needs nvcc, CONSISTENT_TEST_ALL=1"
)
@pytest.mark.parametrize("name", KERNELS)
def test_nvcc_makes_the_same_instances(name, tmp_path):
    flags = "-std=c++17", "-O0", "-arch=sm_90"
    run(NVCC, *flags, "-c", KERNELS[name], "-o", tmp_path / "made.o")
    assert instances(name, tmp_path / "made.o") == instances(name, kernels_object(name, MEMORY))


def test_every_launch_goes_through_one_function():
    for path in [*ROOT.glob("csrc/**/*.cu"), *ROOT.glob("csrc/**/*.cuh")]:
        if path.name != "launch.cuh":
            assert "<<<" not in path.read_text(), path
