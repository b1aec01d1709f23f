"""Writes signatures and docstrings into docs/reference/: `python docs/make_reference.py`.

In a page, a comment names an object, whose signature and docstring are written below it, up to an
end comment:

```
<!-- ::: consistent.parallelize -->
<!-- end -->
<!-- ::: consistent.GlobalTensor register_hook backward -->    a class with only these methods
<!-- end -->
<!-- ::: consistent.integrations.transformers.Trainer . -->    a class without methods
<!-- end -->
```
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
WIDTH = 90  # of a signature on one line
_ENTRY = re.compile(r"^<!-- ::: (\S+)( [^>]*)? -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^(#+) ", re.MULTILINE)
_SECTIONS = ("Args", "Returns", "Raises", "Yields", "Note")


def main() -> None:
    for path in PAGES:
        path.write_text(written(path.read_text()))


def written(page: str) -> str:
    """Return the page with its entries written anew."""
    end, parts = 0, []
    for match in _ENTRY.finditer(page):
        above = _HEADING.findall(_ENTRY.sub("", page[: match.start()]))
        asked = (match[2] or "").split()
        members = [each for each in asked if each != "."] if asked else None
        shown = "\n\n".join(entry(match[1], len(above[-1]) + 1, members))
        mark = match[0].partition("\n")[0]
        parts += [page[end : match.start()], f"{mark}\n\n{shown}\n\n<!-- end -->"]
        end = match.end()
    return "".join([*parts, page[end:]])


def entry(path: str, level: int, members: list[str] | None = None) -> list[str]:
    """Return the paragraphs of a name: heading, signature, docstring, members of a class."""
    value = found(path)
    name = path.rpartition(".")[2]
    parts = [f"{'#' * level} {name}"]
    if not (_is_value(value) or inspect.ismodule(value)):
        parts.append(f"```python\n{signature(name, value)}\n```")
    parts.append(described(value, path))
    if inspect.isclass(value):
        for each in members if members is not None else public(value):
            parts += entry(f"{path}.{each}", level + 1)
    return [part for part in parts if part]


def found(path: str) -> Any:
    """Return the object of a dotted path; a property itself and not its value."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            look = inspect.getattr_static if inspect.isclass(value) else getattr
            value = look(value, part)
        return _bare(value)
    raise AttributeError(f"{path} names nothing")


def _bare(value: Any) -> Any:
    """Return the function of a static or class method; a cached property as a property."""
    if isinstance(value, cached_property):
        return property(value.func)
    return getattr(value, "__func__", value)


def _is_value(value: Any) -> bool:
    """Return whether ``value`` is neither a class, a module, a function nor a property."""
    kinds = inspect.isclass(value) or inspect.ismodule(value) or isinstance(value, property)
    return not (kinds or inspect.isroutine(value))


def public(cls: type) -> list[str]:
    """Return the methods and properties that the class itself documents, not its bases."""
    own = {n: _bare(value) for n, value in vars(cls).items() if not n.startswith("_")}
    return [n for n, value in own.items() if not _is_value(value) and inspect.getdoc(value)]


def signature(name: str, value: Any) -> str:
    """Return the signature, with annotations and defaults as in the source."""
    if isinstance(value, property):
        return f"{name}: {_annotation(inspect.signature(value.fget).return_annotation)}"  # type: ignore[arg-type]
    try:
        made = inspect.signature(value)
    except (TypeError, ValueError):
        return f"{name}(...)"
    parts, star = [], False
    for parameter in made.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        star |= parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts, star = [*parts, "*"], True
        parts.append(_parameter(parameter))
    back = "" if inspect.isclass(value) else _annotation(made.return_annotation)
    return _wrapped(name, parts, back)


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = _annotation(parameter.annotation)
    text = stars + parameter.name + (f": {kind}" if kind else "")
    if parameter.default is parameter.empty:
        return text
    default = getattr(parameter.default, "__name__", None) or repr(parameter.default)
    return f"{text} = {default}" if kind else f"{text}={default}"


def _wrapped(name: str, parts: list[str], back: str) -> str:
    tail = f" -> {back}" if back else ""
    line = f"{name}({', '.join(parts)}){tail}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){tail}"])


def _annotation(given: Any) -> str:
    if given is inspect.Parameter.empty:
        return ""
    return given if isinstance(given, str) else getattr(given, "__name__", None) or str(given)


def described(value: Any, path: str) -> str:
    """Return the docstring as Markdown."""
    return markdown(_text(value, path))


def _text(value: Any, path: str) -> str:
    package, _, name = path.partition(".")
    below = _below(package, name.rpartition(".")[2]) if _is_value(value) else ""
    return below or inspect.getdoc(value) or ""


@cache
def _below(package: str, name: str) -> str:
    """Return the string below the assignment of a value, in any file of the package; "" if none."""
    for path in sorted((ROOT / package).rglob("*.py")):
        text = path.read_text()
        if not re.search(rf"^{name}\b", text, re.MULTILINE):
            continue  # parsing each file takes a second
        body = ast.parse(text).body
        for node, after in zip(body, body[1:], strict=False):
            made = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
            if made and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                return inspect.cleandoc(str(after.value.value))
    return ""


def markdown(text: str) -> str:
    """Convert a docstring in Google style: each section becomes a list below its name in bold."""
    parts: list[str] = []
    for block in re.split(rf"^(?=(?:{'|'.join(_SECTIONS)}):\n)", text, flags=re.MULTILINE):
        match = re.match(r"(\w+):\n((?:(?: .*)?\n?)*)", block)
        if match and match[1] in _SECTIONS:
            parts += [f"**{match[1]}**", _items(match[1], textwrap.dedent(match[2]).strip())]
            block = block[match.end() :]
        parts.append(_quoted(block.strip()))
    return "\n\n".join(part for part in parts if part.strip())


def _items(head: str, text: str) -> str:
    if head in ("Returns", "Yields", "Note"):
        return _quoted(text)
    lines = []
    for line in text.splitlines():
        match = re.match(r"(\*{0,2}\w[\w, .*]*): (.*)", line)
        names = ", ".join(f"`{name}`" for name in match[1].split(", ")) if match else ""
        lines.append(f"* {names}: {match[2]}" if match else line)
    return _quoted("\n".join(lines))


def _quoted(text: str) -> str:
    """Replace double backquotes by single ones, and mark fences without a language as Python."""
    text = re.sub(r"(?<!`)``(?!`)", "`", text)
    is_open, lines = False, []
    for line in text.splitlines():
        if line.strip() == "```":
            line = line if is_open else f"{line}python"
            is_open = not is_open
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
