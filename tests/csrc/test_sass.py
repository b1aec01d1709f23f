"""The machine code of every kernel: nothing spilled, wide loads and stores, and what the speeds of
docs/gpu.md count on. A table of limits; what arithmetic follows from it is in steps.py."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from tests.csrc.compiling import NVCC, ROOT
from tests.csrc.sass import CUFILT, NVDISASM, Code, Resources, build, code_of, kept, readable
from tests.csrc.steps import turn_of
from tests.generated import DOCS, generator
from tests.ranks import ALL

SOURCES = {path.stem: path for path in sorted((ROOT / "csrc").glob("*/*.cu"))}
SOURCES = {
    name: path
    for name, path in SOURCES.items()
    if path.parent.name != "tests" and (ALL or name == "masked_embedding")
}
ARCHS = (75, 80, 86, 89, 90, 100, 120) if ALL else (90,)  # setup.py builds for all of them

needs_nvcc = pytest.mark.skipif(
    NVCC is None or CUFILT is None, reason="nvcc and c++filt were not found"
)
needs_sass = pytest.mark.skipif(
    NVCC is None or CUFILT is None or NVDISASM is None,
    reason="nvcc, c++filt and nvdisasm (of the CUDA toolkit or of triton) were not all found",
)


@dataclass(frozen=True)
class Limit:
    """Registers at most, and from sm_100 on where that differs; bytes at least: of the widest load
    and store, and in flight."""

    registers: int
    load: int = 0
    store: int = 0
    in_flight: int = 0
    from_100: int = 0
    divides: bool = True  # may divide integers in each turn of the loop through that store and load


# The first row that fits the kernel's name counts. An H100 hides its latency with 8 KB in flight on
# each multiprocessor: 80 registers leave it 768 threads, 64 leave 1,024, and each has 16 bytes.
LIMITS = {
    r"reduce_flat<(double, .*, 2|float, .*, 4|\w+, \w+, 8)>": Limit(64, 16, 16, 64, 80),
    r"reduce_flat<\w+, float, 4>": Limit(64, 8, 16, 32, 80),
    r"reduce_flat<.*, 1>": Limit(64, from_100=80),
    r"reduce_rows<(double, .*, 2|float, .*, 4|\w+, \w+, 8), .*<.*> >": Limit(64, 16, 16, 64, 80),
    r"reduce_rows<\w+, float, 4, .*<.*> >": Limit(64, 8, 16, 32, 80),
    r"reduce_rows<.*, 1, .*<.*> >": Limit(64, from_100=80),
    r"reduce_kernel<signed char, 16, .*>": Limit(80, 16, 16, 64),
    r"reduce_kernel<unsigned char, 16, .*>": Limit(80, 16, 16, 80),
    r"reduce_kernel<.*, [248], .*>": Limit(64, 16, 16, 112),
    r"reduce_kernel<.*, 1, .*>": Limit(64),
    r"copy_kernel<.*>": Limit(32),  # and see test_units_are_moved_by_one_instruction
    r"copy_rows<uint4>": Limit(40, 16, 16, 16),
    r"copy_rows<.*>": Limit(40),
    r"scale_rows<.*, [248]>": Limit(40, 16, 16, 16),
    r"scale_rows<.*, 1>": Limit(40),
    r"add_rows<.*, 8>": Limit(80, 16, 16, 64),
    r"add_(rows|long)<.*, [248]>": Limit(64, 16, 16, 64),
    r"add_(rows|long)<.*, 1>": Limit(64),
    r"(link_rows|place_long|sort_long)": Limit(40),
    r"forward_rows<double, .*>": Limit(80, 16, 0, 64),
    r"forward_rows<.*>": Limit(64, 16, 0, 64),
    r"backward_rows<.*>": Limit(64, 16, 16, 16),
    r"(for|back)ward_lanes<double>": Limit(128),
    r"(for|back)ward_lanes<.*>": Limit(80),
    r"bernoulli_kernel<.*>": Limit(80, 16, 16, 32, divides=False),
    r"dropout_kernel<.*>": Limit(64, 16, 16, 16, divides=False),
    r"fill_kernel<(WideInteger|Geometric), (bool|(un)?signed char)>": Limit(
        64, 0, 8, divides=False
    ),
    r"fill_kernel<.*>": Limit(64, 0, 16, divides=False),
    r"(read|write)_kernel<.*>": Limit(64, 16, 16, 16),
}


def limit_of(name: str, arch: int) -> Limit:
    found = [limit for pattern, limit in LIMITS.items() if re.fullmatch(pattern, name)]
    assert found, f"{name} has no row in LIMITS"
    limit = found[0]
    return replace(limit, registers=limit.from_100) if arch >= 100 and limit.from_100 else limit


def too_much(found: Resources, limit: Limit) -> list[str]:
    wrong = [] if found.registers <= limit.registers else [f"{found.registers} registers"]
    return wrong + [f"{found.stack} bytes of stack"] * (found.stack + found.spilled > 0)


def too_narrow(code: Code, limit: Limit) -> list[str]:
    turn = turn_of(code)
    shown = {
        "local memory": code.count("LDL", "STL") > 0,
        f"no load of {limit.load} bytes": limit.load > max(code.widths("LDG"), default=0),
        f"no store of {limit.store} bytes": limit.store > max(code.widths("STG"), default=0),
        f"{code.in_flight()} bytes in flight": code.in_flight() < limit.in_flight,
        "a division in each turn": not limit.divides and turn is not None and turn.divides(),
    }
    return [what for what, wrong in shown.items() if wrong]


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_compiles_and_spills_nothing(source, arch):
    resources = kept(SOURCES[source], arch)[1]
    names = readable(list(resources))
    wrong = {
        names[at]: too_much(found, limit_of(names[at], arch)) for at, found in resources.items()
    }
    assert resources
    assert not {name: what for name, what in wrong.items() if what}


@needs_sass
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", SOURCES)
def test_loads_and_stores_are_as_wide_as_the_speeds_need(source, arch):
    code = code_of(kept(SOURCES[source], arch)[0])
    names = readable(list(code))
    wrong = {names[at]: too_narrow(found, limit_of(names[at], arch)) for at, found in code.items()}
    assert code
    assert not {name: what for name, what in wrong.items() if what}


@needs_sass
@pytest.mark.parametrize(
    ("source", "kernel"),
    [("masked_embedding", "copy_rows"), *([("device_moves", "copy_kernel")] if ALL else [])],
)
def test_units_are_moved_by_one_instruction(source, kernel):
    code = code_of(kept(SOURCES[source], 90)[0])
    names = readable(list(code))
    copies = [found for at, found in code.items() if names[at].startswith(kernel)]
    assert sorted(size for found in copies for size in found.widths("STG")) == [1, 2, 4, 8, 16]
    assert all(found.widths("STG").keys() <= found.widths("LDG").keys() for found in copies)


WRONG = """
__global__ void divides(long* x, long by) {
  for (long i = threadIdx.x; i < by; i += 32) x[i] = i / by;
}
__global__ void keeps_an_array(int* x, const int* at) {
  int kept[64];
  for (int i = 0; i < 64; ++i) kept[at[i]] = i;
  x[threadIdx.x] = kept[at[threadIdx.x]];
}
__global__ void moves_bytes(char* x, const char* y, int n) {
  for (int i = threadIdx.x; i < n; i += 32) x[i] = y[i];
}
__global__ void loads_one_at_a_time(int* x, const int* at) {
  x[threadIdx.x] = at[at[at[threadIdx.x]]];
}
"""


@needs_sass
def test_what_is_wrong_is_found(tmp_path):
    (tmp_path / "wrong.cu").write_text(WRONG)
    resources = build(tmp_path / "wrong.cu", 90, tmp_path / "wrong.cubin")
    code, names = code_of(tmp_path / "wrong.cubin"), readable(list(resources))
    wanted = {
        "divides": Limit(64, divides=False),
        "keeps_an_array": Limit(64, 4, 4),
        "moves_bytes": Limit(8, 4, 4),
        "loads_one_at_a_time": Limit(64, 4, 4, 8),
    }
    found = {
        names[at]: too_much(resources[at], wanted[names[at]])
        + too_narrow(code[at], wanted[names[at]])
        for at in resources
    }
    registers = next(r.registers for at, r in resources.items() if names[at] == "moves_bytes")
    assert found == {
        "divides": ["a division in each turn"],
        "keeps_an_array": ["256 bytes of stack", "local memory"],
        "moves_bytes": [f"{registers} registers", "no load of 4 bytes", "no store of 4 bytes"],
        "loads_one_at_a_time": ["4 bytes in flight"],
    }


@needs_sass
@pytest.mark.skipif(not ALL, reason="CONSISTENT_TEST_ALL=1 compiles for seven architectures")
def test_the_page_shows_what_nvcc_makes_now():
    make, shown = generator("make_kernels"), (DOCS / "kernels.md").read_text()
    if make.version() not in shown:
        pytest.skip("the page was made by another nvcc")
    assert shown == make.page(), "run python docs/make_kernels.py"
