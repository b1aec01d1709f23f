"""A program as text that reads like the step: an op a line, with its layout, bytes and line.

```
program of step: 3 messages, 1.5 KiB sent by this rank
  %4 = mm(%2, %3)                             f32[4, 8] S(0)                    train.py:12
  %5 = message all_gather(%4)                 f32[8, 8] B      512 B            train.py:13
  put %9 into model.0.weight.grad
  call SGD.step as it is written
```
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from torch.fx import Node

from ..nn.nested import map_each
from .opaque import DRAWN, ORDERED, SENDING, START, WAIT
from .program import Program

_LAYOUTS = ("getitem", "_item")


def text(program: Program) -> str:
    """One line for each op."""
    messages = program.messages()
    sent = _size(program.bytes)
    rows: list[tuple[str, str, str, str]] = []
    fresh = count(program.count)
    for part in program.segments:
        names: dict[Node, str] = {}
        for node, number in zip(_inputs(part.graph.graph.nodes), part.inputs, strict=True):
            names[node] = f"%{number}"
        for number, source in part.reads:
            rows.append((f"%{number} = {_source(source)}", _kind(source.x), "", ""))
        numbers = iter(part.outputs)
        returned = next(n for n in part.graph.graph.nodes if n.op == "output").args[0]
        outs = {node: f"%{next(numbers)}" for node in returned}  # type: ignore[union-attr]
        for node in part.graph.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if _is_item(node):  # %3[0]
                whole, i = node.args
                only = len(whole.users) == 1  # type: ignore[union-attr]
                names[node] = names[whole] if only else f"{names[whole]}[{i}]"  # type: ignore[index]
                if node in outs:
                    rows.append((f"{outs[node]} = {names[node]}", _layout(node), "", ""))
                continue
            names[node] = outs.get(node) or f"%{next(fresh)}"
            rows.append(_row(program, node, names))
        for write in part.writes:
            value = "None" if write.value is None else f"%{write.value.value}"
            rows.append((f"put {value} into {write.slot.path}", "", "", ""))
        if part.live is not None:
            rows.append((f"call {part.text} as it is written", "", "", ""))
    widths = [min(max(len(row[i]) for row in rows), most) for i, most in ((0, 70), (1, 60), (2, 9))]
    lines = [f"program of {program.name}: {len(messages)} messages, {sent} sent by this rank"]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  " + "  ".join([*cells, row[3]]).rstrip())
    for saved in program.saved:
        short = saved.text.split(" ")[0]
        lines.append(
            f"  not sent: {short}, {_size(saved.bytes)}, {_line(saved.where)} ({saved.why})"
        )
    return "\n".join(lines)


def _inputs(nodes: Any) -> list[Node]:
    return [node for node in nodes if node.op == "placeholder"]


def _source(source: Any) -> str:
    if source.kind == "slot":
        return f"read {source.at.path}"
    if source.kind == "argument":
        return f"argument {source.at}"
    return "read the learning rate" if source.kind == "rate" else "read seed and count of draws"


def _is_item(node: Node) -> bool:
    return getattr(node.target, "__name__", "") in _LAYOUTS


def _row(program: Program, node: Node, names: dict[Node, str]) -> tuple[str, str, str, str]:
    where = _line(node.meta.get("where", ""))
    if node.op == "get_attr":
        return f"{names[node]} = constant {node.target}", "", "", where
    if node.target in ORDERED or node.target is DRAWN:
        call = program.calls[node.args[-1]]  # type: ignore[index]
        kind = call.kind or call.text.split(" ")[0]
        words = ((DRAWN, "random"), (START, "start"), (WAIT, "wait for"))
        what = next((word for op, word in words if node.target is op), "message")
        given = _shown(node.args[:1], names)
        layout = "".join(_layout(user) for user in list(node.users)[:1])
        boxing = node.meta.get("boxing")
        if boxing is not None:
            layout = f"{layout or _spec(boxing[1])} from {_sbp(boxing[0])}"
        sent = _size(call.bytes) if node.target in SENDING else ""
        return f"{names[node]} = {what} {kind}({given})", layout, sent, where
    name = str(node.target).removeprefix("aten.").rpartition(".")[0]
    given = [_shown([x], names) for x in node.args]
    given += [f"{k}={_shown([x], names)}" for k, x in node.kwargs.items()]
    return f"{names[node]} = {name}({', '.join(given)})", _layout(node), "", where


def _shown(args: Any, names: dict[Node, str]) -> str:
    shown = [map_each(_listed(x), Node, lambda n: _Name(names.get(n, f"%{n.name}"))) for x in args]
    return ", ".join(map(repr, shown))


def _listed(x: Any) -> Any:
    return [_listed(y) for y in x] if isinstance(x, list | tuple) else x


class _Name(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _layout(node: Node) -> str:
    spec = node.meta.get("spec")
    if spec is not None:
        return _spec(spec)
    if "shape" not in node.meta:
        return ""
    dtype = str(node.meta["dtype"]).removeprefix("torch.")
    return f"{dtype}{list(node.meta['shape'])}"


def _kind(x: Any) -> str:
    spec = getattr(x, "_spec", None)
    if spec is not None:
        return _spec(spec)
    return "" if x is None else f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _spec(spec: Any) -> str:
    return str(spec).partition(" on ")[0]


def _sbp(spec: Any) -> str:
    return ", ".join(map(str, spec.sbp))


def _line(where: str) -> str:
    file, _, rest = where.partition(" in ")[0].rpartition(":")
    return f"{Path(file).name}:{rest}" if file else ""


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.4g} GiB"
