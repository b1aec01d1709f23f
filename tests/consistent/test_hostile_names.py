"""Names of others do not break out of what is written: pages, pictures, listings, traces, errors.

Each writer is given a harmless name and a hostile one. Both outputs have the same tags, or lines,
and neither has a character that a terminal obeys or a browser turns around.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import consistent
from consistent import B, S
from consistent.auto.machines.known import KNOWN
from consistent.checkpoint.saving.owner import Owner
from consistent.compiled.page import not_recorded_page
from consistent.compiled.page import page as compiled_page
from consistent.compiled.show import program_text as compiled_text
from consistent.drawing.pages.canvas import canvas
from consistent.drawing.pages.html import frame
from consistent.drawing.pictures.drawing import Box, Drawing, Words
from consistent.nn.plan import Plan
from consistent.report.advice import Advice
from consistent.report.difference import difference
from consistent.report.lines import Line
from consistent.report.page import page as report_page
from consistent.report.text import summary, table
from consistent.verification.compare import Compared, Wrong
from consistent.verification.verify import Verified
from consistent.verification.watch import Key
from mirrored.every_rank import on_every_rank
from mirrored.readable import on_one_line
from tests.csrc.compiling import ROOT

HOSTILE = (
    "<script>alert(1)</script>&\"'><b onclick='x'>\x1b[31m\x9b2J\u202e\u2066]]>-->\n  rank 1: \r$\\"
)
HARMLESS = "name" * (len(on_one_line(HOSTILE)) // 4)  # as long
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def lines(name: str) -> list[Line]:
    layouts = Counter({name: 2, f"{name}, S(0) -> B": 1})
    site = f"/folder/{name}.py:12 in {name}"
    return [
        Line(name, site, 3, True, layouts, Counter({"S(0) -all_gather(0)-> B": 2, name: 1}), 64),
        Line(f"{name}2", "", 1, False, layouts, Counter({name: 1}), 0, True),
    ]


def advice(name: str) -> list[Advice]:
    return [Advice(name, f"{name}.py:3", 64, f"boxes `{name}`", f"Give `{name}` as S(0)")]


def model(name: str) -> nn.Module:
    """Modules and parameters whose names hold anything but a point."""
    inner = nn.Module()
    inner.register_parameter(name, nn.Parameter(torch.ones(4, 2)))
    outer = type(name, (nn.Module,), {})()
    outer.add_module(name, inner)
    outer.add_module("linear", nn.Linear(2, 2))
    return outer


def program(name: str) -> Any:
    """A compiled step of a file and a function with such names, as it was recorded."""
    made: dict[str, Any] = {}
    exec(compile("def step(x):\n    return (x + 1).sum()\n", f"/{name}.py", "exec"), made)
    made["step"].__qualname__ = name
    step: Any = consistent.compile(made["step"], backend="ops")
    x = consistent.ones(4, placement=consistent.placement("cpu", [0]), sbp=B)
    for _ in range(2):
        step(x)
    return step.programs[-1].program


def staged(name: str, folder: Path) -> tuple[str, str, Any]:
    """A pipeline whose modules have such names, on a machine of that name: its listing, its page,
    and what the step takes."""
    with consistent.simulate(2, replace(next(iter(KNOWN.values())), name=name)) as sim:
        net = nn.Sequential()
        net.add_module(name, nn.Linear(4, 8))
        net.add_module("last", nn.Linear(8, 4))
        type(net[0]).__name__, kept = name, type(net[0]).__name__
        try:
            places = [consistent.placement("cpu", [0]), consistent.placement("cpu", [1])]
            pipe = consistent.nn.pipeline(
                net, places, ["last"], loss=nn.functional.mse_loss, micro_batches=2
            )
            for _ in range(2):
                pipe.step(torch.ones(8, 4), torch.ones(8, 4))
            listing = pipe.show(folder / "stages.html")
        finally:
            type(net[0]).__name__ = kept
        return listing, (folder / "stages.html").read_text(), sim.report()


def error_of(name: str) -> str:
    def fail() -> None:
        raise ValueError(f"no tensor of this name: {name!r}, {Owner(name, 1, '', '', name, '')}")

    with pytest.raises(RuntimeError) as raised:
        on_every_rank("load", fail)
    return str(raised.value)


def outputs(name: str, folder: Path) -> dict[str, str]:
    """What each writer makes of a name, by the module of the writer and the kind of the output."""
    before, after = lines(name), lines(f"{name} 2")
    changed = difference(before, after[:1])
    compiled, plan = program(name), Plan({f"{name}.weight": (S(0),)}, notes=[name])
    listing, page, step = staged(name, folder)
    picture, drawing = consistent.visualize(model(name)), Drawing(9, 9, [Words(0, 0, name)], name)
    wrong = Wrong(Key("result", name, 0), f"{name}.py:3", name, name, 1.0, 0.5)
    verified = Verified([Compared(name, [wrong], 1), Compared(name, error="of its own lines")])
    boxed = Drawing(9, 9, [Box(0, 0, 1, 1, title=name)])
    return {
        "report/page html": report_page(before, advice(name), None, summary(before)),
        "report/text text": summary(before) + "\n" + table(before, advice(name)),
        "report/difference_page html": changed.html(),
        "report/difference text": str(changed),
        "compiled/page html": compiled_page(compiled),
        "compiled/page of what is refused html": not_recorded_page(name, name),
        "compiled/show text": compiled_text(compiled),
        "pipeline/page html": page,
        "pipeline/show text": listing,
        "auto/simulation/page html": step.html(),
        "auto/simulation/report text": str(step),
        "verification/page html": verified.html(),
        "verification/verify text": str(verified),
        "drawing/pages/html html": frame(name, name, ""),
        "drawing/pages/canvas html": canvas(name, "", [(name, "--bar")], [(0, name, 1, 2)]),
        "drawing/pictures/drawing svg": drawing.svg(),
        "drawing/pictures/drawing of a title svg": boxed.svg(),
        "drawing/traces json": step.save_trace(folder / "step.json").read_text(),
        "visualize/model svg": picture.svg(),
        "visualize/model text": picture.text(),
        "visualize/model in colours text": picture.text(colour=True),
        "nn/plan/table text": str(plan),
        "every_rank text": error_of(name),
    }  # fmt: skip


class Tags(HTMLParser):
    """The tags of a page, with the names of their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, [name for name, _ in attrs]))

    def handle_endtag(self, tag: str) -> None:
        self.found.append(tag)


def structure(kind: str, text: str) -> Any:
    """What a name must not change."""
    if kind == "html":
        return Tags(text).found
    if kind == "svg":
        return [(each.tag, sorted(each.attrib)) for each in ElementTree.fromstring(text).iter()]
    if kind == "json":
        return len(json.loads(text)["traceEvents"])
    return [len(text.splitlines()), len(text.split("\x1b"))]


def test_a_name_stays_a_name(tmp_path: Path) -> None:
    harmless, hostile = outputs(HARMLESS, tmp_path), outputs(HOSTILE, tmp_path)
    wrong = {}
    for writer, text in hostile.items():
        kind = writer.rpartition(" ")[2]
        if OBEYED.search(re.sub(r"\x1b\[(38;5;\d+|[012])m", "", text)):
            wrong[writer] = f"{OBEYED.search(text)}"
        elif structure(kind, text) != structure(kind, harmless[writer]):
            wrong[writer] = f"{text[:300]}"
        assert HARMLESS[:12] in harmless[writer] or kind == "json", f"{writer} shows no name"
    assert not wrong, "\n".join(f"{writer}: {what}" for writer, what in wrong.items())


def test_every_writer_of_pages_and_pictures_is_given_a_name(tmp_path: Path) -> None:
    """Files of the library that hold tags, or make pages of those that do."""
    tried = {writer.split()[0] for writer in outputs(HARMLESS, tmp_path)}
    found = set()
    for path in (ROOT / "consistent").rglob("*.py"):
        source = path.read_text()
        if re.search(r"</\w+>|\\x1b\[|\bdigraph\b", source):
            found.add(path.relative_to(ROOT / "consistent").with_suffix("").as_posix())
    without_names = {"drawing/pages/script", "drawing/pages/style", "drawing/pictures/colours"}
    assert found - without_names <= tried
