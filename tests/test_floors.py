"""A module may import only its own floor and lower ones. This is checked on the source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(p for top in ("consistent", "mirrored") for p in (ROOT / top).rglob("*.py"))

# The longest matching prefix counts.
FLOORS = {
    "consistent.spec": 1.0,
    "consistent.cost_model": 1.05,
    "consistent.boxing": 1.1,
    "consistent.rules": 1.2,
    "mirrored": 2,
    "mirrored.transports._C": 0,
    "consistent.movement": 3.0,
    "consistent.forms": 3.1,
    "consistent.forms.native._C": 0,
    "consistent.dispatch": 4.0,
    "consistent.dispatch._C": 0,
    "consistent.autograd": 4.1,
    "consistent.tensor": 5.0,
    "consistent.torch_patches": 5.1,
    "consistent.overlap": 6,
    "consistent.nn": 6,
    "consistent.data": 6,
    "consistent.checkpoint": 6,
    "consistent.elastic": 6.5,
    "consistent.islands": 6.5,
    "consistent.drawing": 7,
    "consistent.graph": 5.5,
    "consistent.layout_problem": 5.6,
    "consistent.compiled": 7.5,
    "consistent.pipeline": 8,
    "consistent.step": 8.5,
    "consistent.auto": 8.2,
    "consistent.report": 8.1,
    "consistent.visualize": 8.1,
    "consistent.flow": 9,
    "consistent.verification": 8.6,
    "consistent.integrations": 9,
    "consistent.command": 9,
    "consistent.doctor": 0,
    "consistent.__main__": 10,
    "consistent": 10,  # public names
}
COLLECTIVES = frozenset(
    """all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce
    all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast
    broadcast_object_list gather gather_object irecv isend monitored_barrier recv reduce
    reduce_scatter reduce_scatter_tensor scatter scatter_object_list send
    group new_group ProcessGroup ProcessGroupGloo ProcessGroupNCCL
    """.split()
)  # fmt: skip  (groups too: their methods are the same collectives)
TALKS = ROOT / "mirrored" / "transports" / "torch_dist"

# Trees in which no files import each other in a cycle, and no two folders import each other.
WITHOUT_CYCLES = ("consistent", "mirrored")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NATIVE = {module for module in FLOORS if module.endswith("._C")}
MODULES = {module_of(path) for path in FILES} | NATIVE


def floor_of(module: str) -> float:
    while module not in FLOORS:
        module = module.rpartition(".")[0]
    return FLOORS[module]


@functools.cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """The imports of a source and what has the name of a collective, for which several tests ask
    of each file."""
    return tuple(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Attribute) and node.attr in COLLECTIVES)
    )


def imports(path: Path, source: str, modules: set[str] = MODULES) -> Iterator[tuple[int, str]]:
    """(line, module) of each import; ``from a import b`` is a.b where that is a module."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in nodes_of(source):
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


# The packages that call native ops by themselves.
NATIVE = (
    "consistent.forms",
    "consistent.overlap",
    "consistent.compiled.fused",
    "consistent.checkpoint.saving.copies",
)


def wrong_imports(path: Path, source: str, modules: set[str] = MODULES) -> list[str]:
    """The imports in ``source`` of a higher floor, as file:line and both floors."""
    here = module_of(path)
    found = []
    for line, target in imports(path, source, modules):
        if target.partition(".")[0] not in ("consistent", "mirrored"):
            continue
        top = target == "consistent"  # users import it; no module of the library may
        if top or floor_of(target) > floor_of(here):
            found.append(
                f"{path}:{line}: {here} (floor {floor_of(here)}) imports "
                f"{target} (floor {floor_of(target)})"
            )
        private = target.startswith("consistent.forms.native")
        if private and not here.startswith(NATIVE):
            found.append(f"{path}:{line}: {here} imports {target}, which {NATIVE} may")
        if here.startswith("mirrored") and target.startswith("consistent"):
            found.append(f"{path}:{line}: {here} imports {target}: mirrored/ knows nothing of it")
    return found


def collectives(source: str) -> list[str]:
    """Collectives and groups of torch.distributed that ``source`` names or imports."""
    nodes = nodes_of(source)
    aliases = {"torch.distributed"}
    found = []
    for node in nodes:
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
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def importers(sources: dict[Path, str]) -> dict[str, set[str]]:
    """Module -> the modules of ``sources`` that it imports: at the top, in a function or for types
    only, since each of these couples the two files."""
    modules = {module_of(path) for path in sources}
    return {
        module_of(path): {target for _, target in imports(path, source, modules)}
        & (modules - {module_of(path)})
        for path, source in sources.items()
    }


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The import cycles: sets of modules in which each reaches all others by imports."""
    reached: dict[str, set[str]] = {}
    for start in edges:
        seen, todo = set[str](), list(edges[start])
        while todo:
            if (module := todo.pop()) not in seen:
                seen.add(module)
                todo += edges[module]
        reached[start] = seen
    sets = {frozenset(b for b in reached[a] if a in reached[b]) for a in edges if a in reached[a]}
    return sorted(map(sorted, sets))


def mutual_folders(edges: dict[str, set[str]], packages: set[str]) -> list[tuple[str, str]]:
    """Pairs of folders, neither inside the other, that import each other."""

    def folders(module: str) -> list[str]:
        parts = module.split(".")
        if module not in packages:
            parts.pop()
        return [".".join(parts[: k + 1]) for k in range(len(parts))]

    pairs = {
        (a, b)
        for module, targets in edges.items()
        for target in targets
        for a in folders(module)
        for b in folders(target)
        if a != b and not (a + ".").startswith(b + ".") and not (b + ".").startswith(a + ".")
    }
    return sorted((a, b) for a, b in pairs if a < b and (b, a) in pairs)


def sources_of(tree: str) -> dict[Path, str]:
    return {path: path.read_text() for path in FILES if module_of(path).startswith(tree)}


@pytest.mark.parametrize("tree", WITHOUT_CYCLES)
def test_no_files_import_each_other_in_a_circle(tree: str) -> None:
    assert not circles(importers(sources_of(tree)))


@pytest.mark.parametrize("tree", WITHOUT_CYCLES)
def test_no_two_folders_import_each_other(tree: str) -> None:
    sources = sources_of(tree)
    packages = {module_of(path) for path in sources if path.name == "__init__.py"}
    assert not mutual_folders(importers(sources), packages)


@pytest.mark.parametrize(
    "line",
    [
        "from .b import f",
        "def g():\n    from .b import f",
        "if TYPE_CHECKING:\n    from . import b",
        "import mirrored.b",
    ],
)
def test_a_circle_of_files_is_found(line: str) -> None:
    sources = {"a": line, "b": "from .c import h", "c": "from . import a", "d": "from . import a"}
    edges = importers({ROOT / f"mirrored/{name}.py": text for name, text in sources.items()})
    assert circles(edges) == [["mirrored.a", "mirrored.b", "mirrored.c"]]


def test_folders_that_import_each_other_are_found() -> None:
    sources = {
        "a/__init__.py": "",
        "a/one.py": "from ..b.one import f",
        "a/two.py": "",
        "a/deep/three.py": "from ..two import f",  # a folder may import from the folders above it
        "b/one.py": "",
        "b/two.py": "from ..a import two",
        "c.py": "from .a import one",
    }
    edges = importers({ROOT / "mirrored" / name: text for name, text in sources.items()})
    assert not circles(edges)
    assert mutual_folders(edges, {"mirrored.a"}) == [("mirrored.a", "mirrored.b")]


def test_imports_go_down_the_floors() -> None:
    found = [line for path in FILES for line in wrong_imports(path, path.read_text())]
    assert not found, "\n".join(found)


def test_only_one_folder_calls_collectives_of_torch_distributed() -> None:
    found = {path: collectives(path.read_text()) for path in FILES if path.parent != TALKS}
    found = {str(path): calls for path, calls in found.items() if calls}
    assert not found, found


def test_that_folder_does_call_them() -> None:
    assert collectives((TALKS / "transport.py").read_text())


def test_a_finalizer_can_take_each_lock_again() -> None:
    # The garbage collector runs finalizers in whichever thread allocates, inside a lock too; they
    # may make a spec or end a world, and would wait for their own thread for ever.
    for path in FILES:
        text = path.read_text()
        assert "threading.Lock(" not in text and "import Lock" not in text, f"{path}: take an RLock"


def test_every_folder_and_file_at_the_top_has_a_floor() -> None:
    tops = {name for name in MODULES if name.count(".") == 1 and name.startswith("consistent.")}
    assert tops <= set(FLOORS), f"give {sorted(tops - set(FLOORS))} a floor, in FLOORS"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("consistent/spec/sbp.py", "import consistent.movement.run"),
        ("consistent/spec/sbp.py", "from ..boxing import plan"),
        ("consistent/boxing/plan.py", "from ..rules.signature import Call"),
        ("consistent/boxing/plan.py", "from mirrored import comm"),
        ("consistent/rules/table.py", "def f():\n    from ..forms.registry import form"),
        ("consistent/movement/run.py", "from ..dispatch.hook import plain"),
        ("consistent/dispatch/hook.py", "from ..tensor.global_tensor import GlobalTensor"),
        ("consistent/dispatch/hook.py", "from ..forms.native import load"),
        ("consistent/tensor/making/create.py", "from ... import S"),
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
