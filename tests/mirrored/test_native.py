"""Which build of a native module is loaded, and what is said where none can be."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools
import torch

import consistent  # noqa: F401  (its packages are looked at)
from mirrored import native
from tests.scripts import module_of

ROOT = Path(__file__).parents[2]


PACKAGES = ("mirrored.transports", "consistent.dispatch", "consistent.forms.native")
SUFFIX = EXTENSION_SUFFIXES[0]


def package_with(root: Path, *files: str) -> Path:
    """A package's folder in which these files lie, empty."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


@pytest.mark.parametrize("package", PACKAGES)
def test_the_build_for_this_torch_is_the_one_that_is_loaded(package: str) -> None:
    folder = "torch" + native.torch_release().replace(".", "_")
    assert Path(sys.modules[f"{package}._C"].__file__ or "").parent.name == folder


def test_of_several_builds_the_one_for_torch_at_hand_is_picked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = package_with(
        tmp_path, *(f"torch{n}/_C{SUFFIX}" for n in ("2_9", "2_11", "2_13", "2_15"))
    )
    package_with(package, "torch_dist/__init__.py")  # which is not a build
    assert list(native.builds_by_release(package)) == ["2.9", "2.11", "2.13", "2.15"]
    for version, folder in {
        "2.11.0": "torch2_11",
        "2.13.1+cu130": "torch2_13",
        "2.15.0a0+git": "torch2_15",
    }.items():
        monkeypatch.setattr(torch, "__version__", version)
        assert native.find_build(package, "a._C") == package / folder


@pytest.mark.parametrize(
    ("version", "files", "words"),
    [
        ("2.9.1", [f"torch2_11/_C{SUFFIX}"], ["torch 2.9.1", "torch 2.11 and newer"]),
        (
            "2.16.0",
            [f"torch2_9/_C{SUFFIX}", f"torch2_15/_C{SUFFIX}"],
            ["torch 2.16.0", "builds for torch 2.9 and 2.15 only", "pip install", "C++ compiler"],
        ),
        ("2.13.0", [], ["no build at all", "make build", "C++ compiler"]),
        (
            "2.13.0",
            ["torch2_13/_C.cpython-39-x86_64-linux-gnu.so"],
            ["another Python", "cpython-39", "wheel for this Python"],
        ),
    ],
    ids=["older", "newer", "not built", "another Python"],
)
def test_where_no_build_fits_it_says_which_there_are(
    version: str,
    files: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = package_with(tmp_path, *files)
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError) as error:
        native.find_build(package, "mirrored.transports._C")
    assert error.value.name == "mirrored.transports._C"
    for part in ("mirrored.transports._C", *words):
        assert part in str(error.value)


def test_a_build_for_another_c_library_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a wheel was unpacked in an image with musl, which pip would refuse."""
    tag = sys.implementation.cache_tag
    package = package_with(tmp_path, f"torch2_13/_C.{tag}-x86_64-linux-gnu.so")
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(native, "EXTENSION_SUFFIXES", [f".{tag}-x86_64-linux-musl.so"])
    with pytest.raises(ImportError, match="another C library.*linux-musl.so.*linux-gnu.so"):
        native.find_build(package, "a._C")


def test_a_build_that_does_not_load_says_why_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A module of the same folders whose build is not a shared library.
    package = package_with(
        tmp_path / "broken_native",
        f"torch{native.torch_release().replace('.', '_')}/_C{SUFFIX}",
        "__init__.py",
    )
    (package / "__init__.py").write_text(
        "from mirrored.native import load_build\nload_build(__name__)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError) as error:
        import_module("broken_native")
    for words in ("broken_native._C", torch.__version__, "file too short", "pip install"):
        assert words in str(error.value)


def test_a_build_without_torch_or_compiler_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(ROOT)
    script = module_of(ROOT / "setup.py")
    no_compiler = SimpleNamespace(get_cxx_compiler=lambda: "no-such-compiler")
    with pytest.raises(SystemExit, match=r"`no-such-compiler` was not found.*install g\+\+"):
        script.check_compiler(no_compiler)
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match="torch is not installed.*first .torch==2.13.0"):
        script.load_cpp_extension()


@pytest.mark.parametrize(
    ("known", "seen", "wanted"),
    [
        ("sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_120", 0,
         "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"),
        ("sm_70 sm_75 sm_80 sm_86 sm_89 sm_90", 0, "7.5;8.0;8.6;8.9;9.0+PTX"),
        ("sm_90", 1, None),  # torch builds for the GPUs that it sees
    ],
)  # fmt: skip
def test_where_no_gpu_is_seen_kernels_are_built_for_all_that_nvcc_knows(
    known: str, seen: int, wanted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.chdir(ROOT)
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\nprintf '%s\\n' {known}\n")
    nvcc.chmod(0o755)
    script = module_of(ROOT / "setup.py")
    script.choose_gpus(torch, SimpleNamespace(CUDA_HOME=str(tmp_path)))
    assert os.environ.get("TORCH_CUDA_ARCH_LIST") == wanted
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    script.choose_gpus(torch, SimpleNamespace(CUDA_HOME=str(tmp_path)))
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.6"


def test_kernels_are_built_where_torch_has_cuda_and_the_toolkit_its_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(ROOT)
    script, toolkit = module_of(ROOT / "setup.py"), SimpleNamespace(CUDA_HOME=str(tmp_path))
    with_cuda = SimpleNamespace(version=SimpleNamespace(cuda="13.0"))
    monkeypatch.delenv("CONSISTENT_CUDA", raising=False)
    assert not script.wants_cuda(with_cuda, toolkit)
    monkeypatch.setenv("CONSISTENT_CUDA", "1")
    with pytest.raises(SystemExit, match="which has no headers of CUDA.*Set CUDA_HOME"):
        script.wants_cuda(with_cuda, toolkit)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime_api.h").touch()
    assert script.wants_cuda(with_cuda, toolkit)
    with pytest.raises(SystemExit, match="torch has CUDA None"):
        script.wants_cuda(SimpleNamespace(version=SimpleNamespace(cuda=None)), toolkit)
    monkeypatch.setenv("CONSISTENT_CUDA", "0")
    assert not script.wants_cuda(with_cuda, toolkit)


@pytest.mark.parametrize("flags", ["", "-static-libstdc++"])
def test_it_links_with_libstdcxx_as_a_library_and_as_an_archive(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("LDFLAGS", flags)
    monkeypatch.chdir(ROOT)
    script = module_of(ROOT / "setup.py")
    defined = [f"-D{name}={value or ''}" for name, value in script.defined]
    assert ("-DCONSISTENT_STATIC_LIBSTDCXX=" in defined) == bool(flags)
    user = tmp_path / "user.cpp"  # of what both it and the archive define
    user.write_text(
        "#include <condition_variable>\n#include <functional>\n"
        "int* take(std::unique_lock<std::mutex>& lock, std::condition_variable& met, long n) {\n"
        "  met.wait(lock);\n  if (n > 9) throw std::bad_function_call();\n  return new int[n];\n}\n"
    )
    compiler = script.cpp_extension.get_cxx_compiler()
    words = [compiler, "-shared", "-fPIC", *defined, str(user), script.OLDER, *flags.split()]
    subprocess.run([*words, "-o", str(tmp_path / "made.so")], check=True)
