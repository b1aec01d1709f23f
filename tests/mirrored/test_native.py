"""What is said where a native module cannot be loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools
import torch

import consistent  # noqa: F401  (its packages are looked at)
from tests.scripts import module_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("mirrored/transports/__init__.py", "mirrored.transports._C"),
        ("consistent/dispatch/__init__.py", "consistent.dispatch._C"),
        ("consistent/forms/native/load.py", "consistent.forms.native._C"),
    ],
)
def test_a_native_part_that_is_missing_says_what_to_do(
    file: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The file is run as part of its package, once more, where the native module cannot be found.
    package = sys.modules[module.rpartition(".")[0]]
    monkeypatch.delattr(package, "_C", raising=False)
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    names = {"__name__": f"{package.__name__}.again", "__package__": package.__name__}
    with pytest.raises(ImportError) as error:
        exec(compile((ROOT / file).read_text(), file, "exec"), names)  # noqa: S102
    assert error.value.name == module
    for words in (module, torch.__version__, "pip install", "C++ compiler"):
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
