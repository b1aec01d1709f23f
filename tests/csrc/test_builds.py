"""The kernels stand alone: they build without torch, for every processor, with the same bits."""

import platform

import pytest

from tests.csrc.compiling import CXX, NVCC, ROOT, run
from tests.csrc.emulating import MEMORY, THREADS, build, needs_emulator
from tests.ranks import ALL

KERNELS = ROOT / "csrc" / "kernels"

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc was not found")
needs_x86 = pytest.mark.skipif(
    CXX is None or platform.machine() != "x86_64", reason="a C++ compiler on x86-64 is needed"
)


def build_bits(folder, *flags):
    program = folder / "random_bits"
    sources = ROOT / "csrc" / "tests" / "random_bits.cpp", KERNELS / "random_cpu.cpp"
    run(CXX, "-std=c++17", "-O2", "-ffp-contract=off", *flags, *sources, "-o", program)
    return program


def processor_has(march):
    printed = run(CXX, "-march=native", "-Q", "--help=target")
    needed = {"x86-64-v3": "-mavx2", "x86-64-v4": "-mavx512bw"}[march]
    return any(line.split() == [needed, "[enabled]"] for line in printed.splitlines())


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """What the oldest generation gives."""
    return run(
        build_bits(tmp_path_factory.mktemp("oldest"), "-DCONSISTENT_CLONES=", "-march=x86-64")
    )


@needs_x86
@pytest.mark.skipif(not ALL, reason="CONSISTENT_TEST_ALL=1 compiles for each generation")
@pytest.mark.parametrize("march", ["x86-64-v3", "x86-64-v4"])
def test_every_generation_of_x86_gives_the_same_bits(march, wanted, tmp_path):
    if not processor_has(march):
        pytest.skip(f"this processor is not {march}")
    newer = build_bits(tmp_path, "-DCONSISTENT_CLONES=", f"-march={march}", "-O3")
    assert run(newer) == wanted


BINDINGS = sorted(path.name for path in (ROOT / "csrc" / "bindings").glob("*.cpp"))
PROGRAMS = sorted(path.name for path in (ROOT / "csrc" / "tests").glob("*.cu"))


@pytest.mark.parametrize("source", BINDINGS)
def test_torch_stays_in_the_bindings(source):
    assert "torch/library.h" in (ROOT / "csrc" / "bindings" / source).read_text()
    for kernel in KERNELS.iterdir():
        text = kernel.read_text()
        assert not any(f"#include <{top}/" in text for top in ("torch", "ATen", "c10"))


@needs_nvcc
@pytest.mark.skipif(not ALL, reason="CONSISTENT_TEST_ALL=1 compiles for a GPU what runs on none")
@pytest.mark.parametrize("source", PROGRAMS)  # the kernels: test_sass.py
def test_programs_that_compare_cuda_with_the_cpu_compile(source, tmp_path):
    flags = "-std=c++17", "-O1", "-Xptxas", "-O0", "-arch=sm_90", "-fmad=false"
    flags = *flags, "-Werror=all-warnings"
    run(NVCC, *flags, "-c", ROOT / "csrc" / "tests" / source, "-o", tmp_path / "out.o")


@needs_emulator
@pytest.mark.parametrize("sanitizer", [MEMORY, THREADS])
def test_sanitizers_find_nothing_in_the_fused_kernels(sanitizer):
    names = "split_cross_entropy", "masked_embedding", "reduce_shards"
    sources = tuple(KERNELS / f"{name}_cpu.cpp" for name in names)  # as in test_emulated.py
    cases = (ROOT / "csrc" / "tests" / "kernels_test.cpp",)
    assert "agree" in run(build(sources, sanitizer, cases=cases))
