"""The lines of each program of this folder that are code, and the names that it imports for what
devices there are: the rows of the first table of docs/comparison.md."""

import ast
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = ("ours", "with_dtensor", "with_fsdp_pipeline", "with_jax")
LIBRARIES = ("consistent", "torch.distributed", "jax.sharding")


def lines(name: str) -> int:
    """Lines of code: not empty, no comments, no docstrings."""
    text = (HERE / f"{name}.py").read_text()
    parts = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    left_out = set[int]()
    for node in (ast.parse(text), *parts):
        if ast.get_docstring(node) is not None:
            left_out |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code = enumerate(text.splitlines(), start=1)
    return sum(bool(x.strip()) and x.strip()[0] != "#" and n not in left_out for n, x in code)


def concepts(name: str) -> list[str]:
    """Names of the library for layouts and devices: those that are imported, and attributes of what
    is imported whole."""
    tree = ast.parse((HERE / f"{name}.py").read_text())
    found: list[str] = []
    spaces = {"consistent", "jax"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIBRARIES):
            found += [each.name for each in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in spaces and node.attr in (
                "parallelize",
                "Placement",
                "device_put",
                "make_mesh",
            ):
                found.append(node.attr)
    return list(dict.fromkeys(found))


def rows() -> list[str]:
    """Rows in Markdown."""
    return [
        f"| [`{name}.py`](comparison/{name}.py) | {lines(name)} | {len(concepts(name))}: "
        f"{', '.join(f'`{each}`' for each in concepts(name))} |"
        for name in PROGRAMS
    ]


if __name__ == "__main__":
    print(*rows(), sep="\n")
