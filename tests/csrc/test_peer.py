"""The peer-memory moves stand alone, and are clean under the sanitizers."""

import pytest

from tests.csrc.compiling import CXX, ROOT, run
from tests.ranks import ALL

PEER = ROOT / "csrc" / "peer"

needs_compiler = pytest.mark.skipif(CXX is None, reason="a C++ compiler was not found")


@needs_compiler
@pytest.mark.parametrize(
    "sanitizer, ranks",
    [("thread", "threads"), *([("address,undefined", "processes")] if ALL else [])],
)
def test_every_move_is_right_and_clean(sanitizer, ranks, tmp_path):
    program = tmp_path / "peer_test"
    # Clones for several processors are chosen before a sanitizer has started.
    flags = "-std=c++17", "-O0", "-Werror", "-Wall", "-DCONSISTENT_CLONES="
    sources = ROOT / "csrc" / "tests" / "peer_test.cpp", *PEER.glob("*.cpp")
    run(CXX, *flags, f"-fsanitize={sanitizer}", "-fno-sanitize-recover", *sources, "-o", program)
    assert run(program, ranks) == "every move is right\n"


@needs_compiler
def test_moves_between_devices_are_right_and_clean_where_the_cpu_does_them(tmp_path):
    program = tmp_path / "device_moves_test"
    flags = "-std=c++17", "-O1", "-Werror", "-Wall", "-DCONSISTENT_CLONES="
    sanitizing = "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
    sources = ROOT / "csrc" / "tests" / "device_moves_test.cpp", PEER / "device_moves_cpu.cpp"
    run(CXX, *flags, *sanitizing, *sources, PEER / "reduce.cpp", "-o", program)
    assert run(program) == "every move is right\n"


def test_neither_torch_nor_python_is_needed():
    for source in PEER.iterdir():
        text = source.read_text()
        assert not any(f"#include <{top}" in text for top in ("torch", "ATen", "c10", "Python"))
