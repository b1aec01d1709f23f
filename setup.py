"""Builds the native part, csrc/, into the modules named below, for the torch that is installed.
All else is in pyproject.toml.

Each module lies in a folder named by the release of torch that it was built for, from which
mirrored/native.py picks one; tools/wheels.py joins the builds for several in one wheel.

CONSISTENT_CUDA=1 insists on CUDA kernels, CONSISTENT_CUDA=0 leaves them out; unset, they are built
when torch has CUDA and nvcc is found."""

import os
import shlex
import shutil
import site
import subprocess
import sys
from glob import glob
from pathlib import Path

from setuptools import setup

OLDEST_TORCH = (2, 11)  # of newer ones docs/install.md says which were tried
# CPU and CUDA must give the same bits: multiply and add are fused where the source says so only.
CXX_FLAGS = ["-O3", "-g0", "-Wall", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
NVCC_FLAGS = ["-O3", "-fmad=false"]
# What kernels are built for where no GPU is seen; where one is, torch builds for those it sees.
GPUS = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


def stop(sentence: str) -> None:
    """Ends the build with one sentence; pip prints it as the last line of its report."""
    sys.stdout.flush()
    raise SystemExit(f"consistent: {sentence}")


def load_cpp_extension():
    # pip builds where only setuptools is seen; the torch to build for is that of this Python.
    sys.path += [*site.getsitepackages(), site.getusersitepackages()]
    try:
        import torch
    except ImportError:
        stop(
            f"torch is not installed for {sys.executable}, and the native code is built for the "
            "torch that it will run with; install the one you want first (torch==2.13.0, with "
            "or without CUDA), then run `pip install .`; where a tool builds in an environment of "
            "its own (uv, poetry, python -m build), `pip install --no-build-isolation .`."
        )
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if found < OLDEST_TORCH:
        stop(
            f"torch {torch.__version__} is installed, but the native code is written for torch "
            "2.11 and newer; install one of these, for example torch==2.13.0."
        )
    from torch.utils import cpp_extension

    return torch, cpp_extension


def check_compiler(cpp_extension) -> None:
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler.split()[0]) is None:
        stop(
            f"the C++ compiler `{compiler}` was not found, and ops on global tensors run in C++; "
            "install g++ or clang++ (`apt install g++`, `conda install gxx`), name one in the "
            "environment variable CXX, or build a wheel on a machine that has one "
            "(`pip wheel . --no-deps`) and install that."
        )


def make_compiler_one_word() -> None:
    """Torch takes CXX for one program, and calls ccache by itself where it is found."""
    words = shlex.split(os.environ.get("CXX", ""))
    if len(words) > 1 and Path(words[0]).name in ("ccache", "sccache"):
        words = words[1:]
    if len(words) > 1:
        script = Path("build", "cxx").absolute()
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        script.chmod(0o755)
        words = [str(script)]
    if words:
        os.environ["CXX"] = words[0]


def wants_cuda(torch, cpp_extension) -> bool:
    choice = os.environ.get("CONSISTENT_CUDA", "")
    if choice not in ("", "0", "1"):
        stop(f"CONSISTENT_CUDA is {choice!r}, but only 0, 1 or nothing has a meaning.")
    home = cpp_extension.CUDA_HOME
    # Where nvcc is a script in a folder of commands, its headers do not lie beside that folder.
    has_toolkit = home is not None and Path(home, "include", "cuda_runtime_api.h").exists()
    if choice == "1" and (torch.version.cuda is None or not has_toolkit):
        stop(
            f"CONSISTENT_CUDA=1, but torch has CUDA {torch.version.cuda} and the CUDA toolkit is "
            f"at {home}{'' if has_toolkit or home is None else ', which has no headers of CUDA'}; "
            "both are needed. Set CUDA_HOME to the toolkit's folder, or CONSISTENT_CUDA=0."
        )
    return torch.version.cuda is not None and has_toolkit and choice != "0"


def choose_gpus(torch, cpp_extension) -> None:
    """Names the GPUs to build for, which torch can't where it sees none: those that nvcc knows, and
    for newer ones the last as PTX."""
    if os.environ.get("TORCH_CUDA_ARCH_LIST") or torch.cuda.device_count() > 0:
        return
    nvcc = Path(cpp_extension.CUDA_HOME, "bin", "nvcc")
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True)
    found = [gpu for gpu in GPUS if "sm_" + gpu.replace(".", "") in known.stdout.split()]
    os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(found) + "+PTX"


OLDER = "csrc/glibc/older.cpp"

# Package -> the folders of csrc/ that its module `_C` is built from, beside glibc/.
MODULES = {
    "consistent.forms.native": ("kernels", "bindings"),
    "consistent.dispatch": (
        "bindings/dispatch",
        "bindings/dispatch/gradients",
        "bindings/dispatch/lookup",
        "bindings/dispatch/redirect",
    ),
    "mirrored.transports": ("peer", "bindings/peer"),
}


def as_one(name, sources):
    """A file in build/ that includes `sources`. Torch's headers take most of the time of compiling
    a file that binds to Python; so they are read once for all of these."""
    path = Path("build", "as_one", f"{name}.cpp")
    text = "".join(f'#include "../../{source}"\n' for source in sources)
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(path)


def macros(cpp_extension, cuda):
    """What is defined for the preprocessor. A compiler that links libstdc++ as an archive is found
    by a trial, for it may be its build, a wrapper or LDFLAGS that makes it do so."""
    trial = Path("build", "older.so")
    trial.parent.mkdir(exist_ok=True)
    words = shlex.split(f"{cpp_extension.get_cxx_compiler()} -shared -fPIC -o {trial} {OLDER}")
    words += shlex.split(os.environ.get("LDFLAGS", ""))
    has_shared = subprocess.run(words, capture_output=True).returncode == 0
    return [
        ("PY_SSIZE_T_CLEAN", None),  # lengths that Python's C API is given are Py_ssize_t
        *([("CONSISTENT_WITH_CUDA", None)] if cuda else []),
        *([] if has_shared else [("CONSISTENT_STATIC_LIBSTDCXX", None)]),
    ]


def extension(cpp_extension, cuda, defined, package, folders):
    found = sorted(f for folder in ("glibc", *folders) for f in glob(f"csrc/{folder}/*.c*"))
    kinds = (".cpp", ".cu") if cuda else (".cpp",)
    sources = [f for f in found if f.endswith(kinds) and not (cuda and "/no_cuda" in f)]
    bindings = [f for f in sources if f.startswith("csrc/bindings")]
    others = [f for f in sources if f not in bindings]
    make = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    return make(
        f"{package}.{FOLDER}._C",
        [*others, as_one(package, bindings)],
        define_macros=defined,
        depends=bindings
        + sorted(glob("csrc/**/*.h", recursive=True))
        + sorted(glob("csrc/**/*.cuh", recursive=True)),
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
    )


torch, cpp_extension = load_cpp_extension()
check_compiler(cpp_extension)
make_compiler_one_word()
cuda = wants_cuda(torch, cpp_extension)
if cuda:
    choose_gpus(torch, cpp_extension)
defined = macros(cpp_extension, cuda)
FOLDER = "torch{}_{}".format(*torch.__version__.split(".")[:2])


class BuildExt(cpp_extension.BuildExtension):
    def finalize_options(self):
        super().finalize_options()
        # Without ninja, a module newer than its sources would stay as it is, even if it was built
        # with other flags: with CUDA, or for another build of this torch.
        self.force = True

    def copy_extensions_to_source(self):
        for package in MODULES:
            inside = Path(*package.split("."))
            (inside / FOLDER).mkdir(exist_ok=True)
            for old in inside.glob("_C.*.so"):  # where modules lay before there were folders
                old.unlink()
        super().copy_extensions_to_source()


setup(
    ext_modules=[extension(cpp_extension, cuda, defined, *module) for module in MODULES.items()],
    cmdclass={"build_ext": BuildExt},
)
