"""Writes docs/errors.md, every message that the library raises: `python docs/make_errors.py`.

The messages are read from the source: each call of an exception class, or of a function that makes
such an exception, with words in it. Braces stand for text that a message fills in.
"""

from __future__ import annotations

import ast
import builtins
import gc
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Signals within the library that no user sees.
INTERNAL = {"DoesNotFit", "Communicated", "SkipFrame"}

# Exceptions of torch that do not end in Error.
OF_TORCH = {"Unsupported"}

# The longest prefix of a file's path counts.
AREAS = {
    "consistent/__init__": "Names of the package",
    "consistent/spec": "Placements and SBP",
    "consistent/boxing": "Boxing",
    "consistent/movement": "Boxing",
    "consistent/rules": "Rules of ops",
    "consistent/forms": "Running an op",
    "consistent/dispatch": "Running an op",
    "consistent/autograd": "Gradients",
    "consistent/tensor": "Making, reading and saving tensors",
    "consistent/torch_patches": "Functions of torch that cannot take a global tensor",
    "consistent/overlap": "Matmuls that overlap their boxing",
    "consistent/nn": "Parallelizing a module",
    "consistent/data": "Data",
    "consistent/checkpoint": "Checkpoints",
    "consistent/elastic": "Ranks that are lost",
    "consistent/islands": "Islands",
    "consistent/drawing": "Pages and pictures",
    "consistent/graph": "Steps that are recorded, and stages",
    "consistent/compiled": "Compiled steps",
    "consistent/pipeline": "Pipelines",
    "consistent/step": "nn.Graph",
    "consistent/report": "Reports",
    "consistent/visualize": "Reports",
    "consistent/verification": "Verifying",
    "consistent/command": "The command line",
    "consistent/doctor": "The command line",
    "consistent/__main__": "The command line",
    "consistent/auto": "Planning",
    "consistent/cost_model": "Planning",
    "consistent/layout_problem": "Planning",
    "consistent/nn/planners/layout_search": "Planning",
    "consistent/integrations": "Other libraries",
    "consistent/flow": "consistent.flow",
    "mirrored": "Mirrored tensors, collectives and transports",
}


@dataclass(frozen=True)
class Message:
    """One message: its exception, its words with what is filled in as {name}, and its file."""

    kind: str
    words: str
    file: str


@dataclass(frozen=True)
class File:
    """A file of the library: what of its syntax matters here, in the order of lines."""

    name: str
    classes: list[ast.ClassDef]
    functions: list[ast.FunctionDef]
    calls: list[ast.Call]
    raised: list[ast.Call]


@cache
def files() -> list[File]:
    """Every file of the library."""
    paths = [path for top in ("consistent", "mirrored") for path in (ROOT / top).rglob("*.py")]
    collects = gc.isenabled()
    gc.disable()  # the collector would visit all trees repeatedly, which takes three times as long
    try:
        return [
            _file(path.relative_to(ROOT).as_posix(), path.read_text()) for path in sorted(paths)
        ]
    finally:
        if collects:
            gc.enable()


def _file(name: str, source: str) -> File:
    file = File(name, [], [], [], [])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            file.classes.append(node)
        elif isinstance(node, ast.FunctionDef):
            file.functions.append(node)
        elif isinstance(node, ast.Call):
            file.calls.append(node)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            file.raised.append(node.exc)
    file.calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return file


def exceptions() -> set[str]:
    """Names of exception classes: Python's, those that the library derives from them, and what it
    raises under a name that ends as theirs or is in ``OF_TORCH``."""
    found = OF_TORCH | {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    raised = {_name(call) for file in files() for call in file.raised}
    found |= {name for name in raised if name.endswith("Error")}
    classes = [each for file in files() for each in file.classes]
    while more := {c.name for c in classes if any(_name(b) in found for b in c.bases)} - found:
        found |= more
    return {name for name in found if not name.endswith("Warning")} - INTERNAL


def messages() -> list[Message]:
    """Every message, in the order of files and lines; each once in a file."""
    kinds = exceptions()
    makers = {
        function.name: _name(function.returns)
        for file in files()
        for function in file.functions
        if function.returns and _name(function.returns) in kinds
    }
    found: dict[Message, None] = {}
    for file in files():
        for call in file.calls:
            name = _name(call.func)
            if not call.args:
                continue
            if name in kinds:
                words = words_of(call.args[0]).strip()
            elif name in makers:  # a function that makes the error, of words that are given here
                parts = [words_of(arg).strip() for arg in call.args]
                words = "\n  ".join(part for part in parts if " " in part)
            else:
                continue
            if " " in words and any(c.isalpha() for c in _without_fields(words)):
                found[Message(makers.get(name, name), words, file.name)] = None
    return list(found)


def words_of(node: ast.expr) -> str:
    """The text that an expression makes, with what is filled in as {name}; "" of what is no
    text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{" + _field(part) + "}"
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [words_of(side) or "{" + _field(side) + "}" for side in (node.left, node.right)]
        return "".join(sides)
    if isinstance(node, ast.IfExp):
        return " or ".join(filter(None, (words_of(node.body), words_of(node.orelse))))
    return ""


def _field(node: ast.expr) -> str:
    """A short name of what is filled in: the last name that the expression mentions."""
    value = node.value if isinstance(node, ast.FormattedValue) else node
    if isinstance(value, ast.IfExp):
        return words_of(value) or _field(value.body)
    if isinstance(value, ast.Call) and value.args and _name(value.func) in ("tuple", "list", "str"):
        return _field(value.args[0])
    if isinstance(value, ast.Subscript):
        return _field(value.value)
    if isinstance(value, ast.BinOp):
        return "number" if not isinstance(value.op, ast.Mod) else "text"
    return _name(value).strip("_") or "..."


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        plain = {"__name__": "name", "__qualname__": "name"}
        return plain.get(node.attr, node.attr)
    if isinstance(node, ast.Call):
        return _name(node.func)
    return ""


def _without_fields(words: str) -> str:
    return "".join(part.rpartition("}")[2] for part in words.split("{"))


def area(file: str) -> str:
    """The heading under which the messages of a file stand."""
    return AREAS[max((p for p in AREAS if file.startswith(p)), key=len)]


def entry(message: Message) -> str:
    """A message: its exception and module, then its words as they are printed."""
    module = message.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    lines = [
        wrapped
        for line in message.words.splitlines()
        for wrapped in textwrap.wrap(
            line, 96, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False, break_on_hyphens=False, drop_whitespace=True,
        ) or [""]
    ]  # fmt: skip
    return f"{message.kind} in `{module}`\n\n```text\n" + "\n".join(lines) + "\n```\n"


_HEAD = """# Every message

{count} messages of this library's source, by area. Written by `python docs/make_errors.py`.
Braces stand for text that a message fills in: search for the words around them. Most messages have
three parts: what was given, why it cannot work, and what to call instead. [Causes and
cures](when_it_goes_wrong.md) explains the most likely ones. The messages of ranks that wait in vain
are on [another page](faults.md). Messages of torch itself are not listed.
"""


def page() -> str:
    """The whole document."""
    found = messages()
    parts = [_HEAD.format(count=len(found))]
    for title in dict.fromkeys(AREAS.values()):
        entries = [entry(message) for message in found if area(message.file) == title]
        if entries:
            parts += [f"## {title}\n", *entries]
    return "\n".join(parts)


def main() -> None:
    (ROOT / "docs" / "errors.md").write_text(page())


if __name__ == "__main__":
    main()
