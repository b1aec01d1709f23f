"""What a type checker finds in a user's file."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import consistent

MAKING = Path(consistent.__file__).parent / "tensor" / "making"
FILE = """
from typing import reveal_type
import torch
import consistent
from consistent import B, S

p = consistent.placement("cpu", ranks=[0, 1])
x = consistent.randn(4, 5, placement=p, sbp=0)
w = consistent.distribute(torch.zeros(5, 8), p, "B")
reveal_type(x)
reveal_type(x.sbp)
reveal_type(x.placement)
reveal_type(w.to_global(sbp=(S(1),)))
reveal_type(consistent.from_local(torch.zeros(2, 5), p, B).to_local())
x.redistribute()
consistent.randm(4)
consistent.checkpoint.sav("run")
"""
TYPES = ["GlobalTensor", "tuple[Sbp, ...]", "Placement", "GlobalTensor", "Tensor"]


def functions(path: Path) -> dict[str, str]:
    """Public function -> its arguments, as they are written."""
    found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {each.name: ast.unparse(each.args) for each in found if not each.name.startswith("_")}


@pytest.mark.parametrize("name", ["create", "factories"])
def test_stubs_have_the_functions_of_their_files(name: str) -> None:
    assert functions(MAKING / f"{name}.pyi") == functions(MAKING / f"{name}.py")


@pytest.mark.parametrize("package", ["consistent", "mirrored"])
def test_packages_say_that_they_have_types(package: str) -> None:
    assert (Path(consistent.__file__).parents[1] / package / "py.typed").is_file()


def test_pyright_finds_the_attributes_of_a_global_tensor(tmp_path: Path) -> None:
    pyright = shutil.which("pyright") or shutil.which(
        "pyright", path=str(Path(sys.executable).parent)
    )
    if pyright is None:
        pytest.skip("pyright is not installed")
    (tmp_path / "first.py").write_text(FILE)
    root = str(Path(consistent.__file__).parents[1])
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [root]}))
    command = [pyright, "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = json.loads(told.stdout)["generalDiagnostics"]
    revealed = [
        d["message"].split(" is ")[1].strip('"') for d in found if "Type of" in d["message"]
    ]
    assert revealed == TYPES, found
    wrong = [d["message"] for d in found if d["severity"] == "error"]
    names = ("redistribute", "randm", "sav")
    assert len(wrong) == len(names) and all(f'"{n}"' in w for n, w in zip(names, wrong)), wrong
