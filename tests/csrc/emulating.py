"""The ``.cu`` files compiled for the CPU, under sanitizers, with csrc/tests/emulator for CUDA.

What is compiled is kept in build/emulated, by the hash of the preprocessed source."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.csrc.compiling import CXX, ROOT, run
from tests.ranks import ALL

CSRC = ROOT / "csrc"
EMULATOR = CSRC / "tests" / "emulator"
KERNELS = {path.stem: path for path in sorted(CSRC.glob("*/*.cu")) if path.parent.name != "tests"}
# Sanitizers; one program can't have all. EXACT is MEMORY with all that it can check.
MEMORY, EXACT, THREADS, NONE = "memory", "exact memory", "threads", "none"

needs_emulator = pytest.mark.skipif(
    CXX is None or shutil.which("nm") is None or sys.platform != "linux",
    reason="a C++ compiler and nm on Linux are needed",
)

_CACHE = ROOT / "build" / "emulated"
# Two blocks at most, so that each takes many turns. As on the GPU, a pack of elements may be read
# as another type. -Og compiles in two thirds of the time of -O1, and what it makes is as fast.
_FLAGS = (
    "-std=c++17", "-Og", "-g1", "-pthread", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
    "-ffp-contract=off", "-fno-strict-aliasing", "-DCONSISTENT_CLONES=",
    "-DCONSISTENT_MOST_BLOCKS=2",
)  # fmt: skip


@functools.cache
def _compiler() -> str:
    return run(CXX, "--version") + platform.machine()


@functools.cache
def _sanitizing(sanitizer: str) -> tuple[str, ...]:
    if sanitizer == NONE:
        return ()
    if sanitizer == THREADS:
        return "-fsanitize=thread", "-fno-sanitize-recover=all"
    exact = "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
    if sanitizer == EXACT:
        return exact
    # What these would see, others of them see in most cases (an index beyond a local array is one
    # that is out of bounds), and they take two thirds of the time of compiling.
    given = "-mllvm", "-asan-stack=0"
    given = given if "clang" in _compiler() else ("--param", "asan-stack=0")
    return *exact, "-fno-sanitize=null,object-size,pointer-overflow,vptr", *given


@functools.cache
def _object(source: Path, tree: Path, folder: Path, flags: tuple[str, ...]) -> Path:
    """``source``, compiled in ``tree``, from the cache or else in ``folder``."""
    emulator = tree / EMULATOR.relative_to(ROOT)
    given = [*flags, f"-ffile-prefix-map={tree}/="]
    if source.suffix == ".cu":
        given += [f"-I{emulator}", "-include", "cuda_runtime.h", "-x", "c++"]
    text = run(CXX, *given, "-E", "-P", source)
    key = hashlib.sha256(repr((_compiler(), flags, text)).encode()).hexdigest()[:24]
    made = f"{source.stem}-{key}.o"
    if (_CACHE / made).exists():
        return _CACHE / made
    folder.mkdir(parents=True, exist_ok=True)
    partly = folder / f"{made}.{os.getpid()}"
    run(CXX, *given, "-c", source, "-o", partly)
    return partly.replace(folder / made)


def _flags(source: Path, sanitizer: str) -> tuple[str, ...]:
    # Of a kernel's instances for other types, ThreadSanitizer would see the same template.
    few = sanitizer == THREADS and source.suffix == ".cu" and not ALL
    return *_FLAGS, *_sanitizing(sanitizer), *(("-DCONSISTENT_FEW_TYPES",) if few else ())


@functools.cache
def build(
    sources: tuple[Path, ...],
    sanitizer: str,
    *,
    cases: tuple[Path, ...] = (),
    tree: Path = ROOT,
    folder: Path = _CACHE,
) -> Path:
    """The program of ``sources``, which lie in ``tree``: the checkout, or a changed copy of it.

    What calls them, ``cases``, is compiled without the sanitizer, once for all programs.
    """
    objects = [_object(source, tree, folder, _flags(source, sanitizer)) for source in sources]
    emulator = sorted((tree / EMULATOR.relative_to(ROOT)).glob("*.cpp"))
    objects += [_object(source, tree, folder, _FLAGS) for source in cases]
    objects += [_object(source, tree, folder, (*_FLAGS, "-O2")) for source in emulator]
    key = hashlib.sha256(" ".join(made.name for made in objects).encode()).hexdigest()[:24]
    program = folder / f"{sources[0].stem}-{key}"
    if not program.exists():
        partly = folder / f"{program.name}.{os.getpid()}"
        run(CXX, *_sanitizing(sanitizer), *objects, "-o", partly)
        partly.replace(program)
    return program


def kernels_object(name: str, sanitizer: str) -> Path:
    """The object file of a ``.cu`` file."""
    return _object(KERNELS[name], ROOT, _CACHE, _flags(KERNELS[name], sanitizer))


def build_kernels(name: str, sanitizer: str, *, tree: Path = ROOT, folder: Path = _CACHE) -> Path:
    """The program csrc/tests/NAME_test.cu with its kernels and their twins for the CPU."""
    kernels = tree / KERNELS[name].relative_to(ROOT)
    sources = [kernels, kernels.with_name(f"{name}_cpu.cpp")]
    if kernels.parent.name == "peer":
        sources.append(kernels.with_name("reduce.cpp"))
    cases = (tree / "csrc" / "tests" / f"{name}_test.cu",)
    return build(tuple(sources), sanitizer, cases=cases, tree=tree, folder=folder)


def outcome(program: Path, *words: object, **environment: object) -> tuple[int, str]:
    """The exit status, and all that the program printed."""
    given = [f"{name}={value}" for name, value in environment.items()]
    script = 'env "$@" 2>&1; echo "$?"'
    printed = run("sh", "-c", script, "sh", *given, program, *words)
    text, _, status = printed.rstrip("\n").rpartition("\n")
    return int(status), text


def global_functions(name: str) -> set[str]:
    """The names of the ``__global__`` functions of a ``.cu`` file, as they are written."""
    bounds = r"(?:__launch_bounds__\([^)]*\)\s*)?"
    return set(re.findall(rf"__global__\s+void\s+{bounds}(\w+)\(", KERNELS[name].read_text()))


def _symbols(binary: Path) -> dict[str, int]:
    """Function or linker's symbol -> its address."""
    lines = [line.split(maxsplit=2) for line in run("nm", "-C", binary).splitlines()]
    return {line[2]: int(line[0], 16) for line in lines if len(line) == 3 and line[1] in "tTWR"}


def instances(name: str, binary: Path) -> set[str]:
    """The instances of the ``__global__`` functions of a ``.cu`` file in its object file."""
    names = "|".join(global_functions(name))
    wanted = re.compile(rf"(?:void )?consistent::[\w:() ]*::({names})[<(]")
    return {
        symbol for symbol in _symbols(binary) if wanted.match(symbol) and "{lambda" not in symbol
    }


def executed(program: Path, listed: Path) -> set[str]:
    """The kernels in the file that EMULATED_KERNELS named."""
    symbols = _symbols(program)
    start = symbols["__executable_start"]
    names = {address - start: symbol for symbol, address in symbols.items()}
    return {names[int(line.split()[0], 16)] for line in listed.read_text().splitlines()}
