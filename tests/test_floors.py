"""A module imports its own floor or lower ones; read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(p for top in ("consistent", "mirrored") for p in (ROOT / top).rglob("*.py"))

# The longest prefix counts.
FLOORS = {
    "consistent.spec": 1,
    "consistent.rules": 1,
    "consistent.boxing": 1,
    "consistent.boxing.run": 3,
    "consistent.boxing.differentiable": 3,
    "consistent.boxing.check": 3,
    "consistent.boxing.run_exchange": 3,
    "mirrored": 2,
    "mirrored.transports._C": 0,
    "consistent.local": 3,
    "consistent.local._C": 0,
    "consistent.tensor": 5,
    "consistent.tensor._C": 0,
    "consistent.tensor.autograd": 4,
    "consistent.tensor.buckets": 4,
    "consistent.tensor.gradients": 4,
    "consistent.tensor.arguments": 4,
    "consistent.tensor.candidates": 4,
    "consistent.tensor.dispatch": 4,
    "consistent.tensor.execute": 4,
    "consistent.tensor.follow": 4,
    "consistent.tensor.foreach": 4,
    "consistent.tensor.key": 4,
    "consistent.tensor.meta": 4,
    "consistent.tensor.plan": 4,
    "consistent.tensor.planning": 4,
    "consistent.tensor.shards": 4,
    "consistent.tensor.ties": 4,
    "consistent.tensor.naming": 4,
    "consistent.tensor.wrapped": 4,
    "consistent.nn": 6,
    "consistent.optim": 6,
    "consistent.checkpoint": 6,
    "consistent.graph": 7,
    "consistent.pipeline": 8,
    "consistent.auto": 8,
    "consistent.report": 8,
    "consistent.flow": 9,
    "consistent": 10,  # public names
}
COLLECTIVES = frozenset(
    """all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce
    all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast
    broadcast_object_list gather gather_object irecv isend monitored_barrier recv reduce
    reduce_scatter reduce_scatter_tensor scatter scatter_object_list send
    group new_group ProcessGroup ProcessGroupGloo ProcessGroupNCCL
    """.split()
)  # fmt: skip  (groups as well: their methods are the same collectives)
TALKS = "mirrored/transports/torch_dist.py"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NATIVE = {module for module in FLOORS if module.endswith("._C")}
MODULES = {module_of(path) for path in FILES} | NATIVE


def floor_of(module: str) -> int:
    while module not in FLOORS:
        module = module.rpartition(".")[0]
    return FLOORS[module]


def imports(path: Path, source: str, modules: set[str] = MODULES) -> Iterator[tuple[int, str]]:
    """(line, module) of each import; ``from a import b`` is a.b where that is a module."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            base = ".".join([*up, *([node.module] if node.module else [])])
            for name in node.names:
                full = f"{base}.{name.name}"
                yield node.lineno, full if full in modules else base


def wrong_imports(path: Path, source: str, modules: set[str] = MODULES) -> list[str]:
    """What in ``source`` goes up a floor, as file:line and both floors."""
    here = module_of(path)
    found = []
    for line, target in imports(path, source, modules):
        if target.partition(".")[0] not in ("consistent", "mirrored"):
            continue
        top = target == "consistent"  # what a user imports; no module of ours needs it
        if top or floor_of(target) > floor_of(here):
            found.append(
                f"{path}:{line}: {here} (floor {floor_of(here)}) imports "
                f"{target} (floor {floor_of(target)})"
            )
        if target.startswith("consistent.local._") and not here.startswith("consistent.local"):
            found.append(f"{path}:{line}: {here} imports {target}, which local/ alone may")
        if here.startswith("mirrored") and target.startswith("consistent"):
            found.append(f"{path}:{line}: {here} imports {target}: mirrored/ knows nothing of it")
    return found


def collectives(source: str) -> list[str]:
    """Collectives and groups of torch.distributed that ``source`` names or imports."""
    tree = ast.parse(source)
    aliases = {"torch.distributed"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {
                n.asname for n in node.names if n.asname and n.name.startswith("torch.distributed")
            }
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module == "torch":
                aliases |= {n.asname or n.name for n in node.names if n.name == "distributed"}
            if node.module.startswith("torch.distributed"):
                found += [f"{node.lineno}: {n.name}" for n in node.names if n.name in COLLECTIVES]
                aliases |= {n.asname or n.name for n in node.names}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in COLLECTIVES
            and ast.unparse(node.value) in aliases
        ):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_down_the_floors(path: Path) -> None:
    assert not wrong_imports(path, path.read_text())


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_one_module_calls_collectives_of_torch_distributed(path: Path) -> None:
    found = collectives(path.read_text())
    assert bool(found) == (path == ROOT / TALKS), found


def test_every_folder_and_file_at_the_top_has_a_floor() -> None:
    tops = {name for name in MODULES if name.count(".") == 1 and name.startswith("consistent.")}
    assert tops <= set(FLOORS), f"give {sorted(tops - set(FLOORS))} a floor, in FLOORS"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("consistent/spec/sbp.py", "import consistent.boxing.run"),
        ("consistent/spec/sbp.py", "from ..boxing import run"),
        ("consistent/boxing/plan.py", "from .run import run"),
        ("consistent/boxing/plan.py", "from mirrored import comm"),
        ("consistent/rules/linalg.py", "def f():\n    from ..local.forms import form"),
        ("consistent/boxing/run.py", "from ..tensor.dispatch import plain"),
        ("consistent/tensor/dispatch.py", "from .global_tensor import GlobalTensor"),
        ("consistent/tensor/dispatch.py", "from ..local import _native"),
        ("consistent/tensor/create.py", "from .. import S"),
        ("mirrored/comm.py", "from consistent.spec import S"),
        ("consistent/nn/__init__.py", "from ..report import report"),
    ],
)
def test_an_import_that_goes_up_is_found(file: str, source: str) -> None:
    assert wrong_imports(ROOT / file, source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.distributed.all_reduce(x)",
        "import torch.distributed as dist\ndist.all_gather(x)",
        "from torch import distributed as d\nd.broadcast(x, 0)",
        "from torch.distributed import all_to_all",
        "from torch.distributed import nn as dnn\ndnn.all_reduce(x)",
    ],
)
def test_a_call_of_a_collective_is_found(source: str) -> None:
    assert collectives(source)
