"""The programs in a page of docs/: what they are, and what they print when they are run.

A page's blocks of Python are run in order, as one program, on every rank of a pool. Comments of
Markdown say what else a reader of the page does not need to know:

```
<!-- ranks: 4 -->             a new program begins here, on four ranks (without it: two); with 0 it
                              runs in one process, without torch.distributed
<!-- not run: the reason -->  the next block is not run
<!-- given: some Python -->   what the next block needs and a reader knows, such as her own model
```

A block with the title "prints" holds what the block of Python before it prints: the text of all
ranks if it is the same, else the lines of each rank behind its number. ``docs/make_pages.py``
writes it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import linecache
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from consistent.compiled.backends import BACKENDS
from consistent.dispatch.plans import plan
from tests.ranks import ALL, pool

PRINTS = '```text title="prints"\n'
_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>ranks|not run|given): ?(?P<said>.+?) ?-->"
    r"|```(?P<language>[\w+-]*)[^\n]*\n(?P<text>.*?)^```$"
    r"(?P<output>\n\n```text title=\"prints\"\n.*?^```$)?)",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of Python, where it stands in the page, and what the page says that it prints."""

    text: str
    line: int
    output: str
    start: int  # of the block and its output, in characters
    end: int
    is_shown: bool = True


@dataclass(frozen=True)
class Program:
    """The blocks that run one after the other, with the same names, on ``ranks`` ranks."""

    ranks: int
    blocks: tuple[Block, ...]


def programs(page: str) -> list[Program]:
    """What is run of a page."""
    found: list[tuple[int, list[Block]]] = [(2, [])]
    skipped = False
    for match in _FENCE.finditer(page):
        if match["mark"] == "ranks":
            found.append((int(match["said"]), []))
        elif match["mark"] == "given":
            line = page[: match.start("said")].count("\n") + 1
            block = Block(match["said"], line, "", match.start(), match.end(), is_shown=False)
            found[-1][1].append(block)
        elif match["mark"] == "not run" or skipped:
            skipped = bool(match["mark"])
        elif match["language"] == "python":
            line = page[: match.start("text")].count("\n") + 1
            output = (match["output"] or "").removeprefix(f"\n\n{PRINTS}").removesuffix("```")
            found[-1][1].append(Block(match["text"], line, output, match.start(), match.end()))
    return [Program(ranks, tuple(blocks)) for ranks, blocks in found if blocks]


def outputs(page: str, name: str) -> Iterator[tuple[Block, str]]:
    """Each block of a page, in order, with what it prints now."""
    for program in programs(page):
        texts = [(block.line, block.text) for block in program.blocks]
        if program.ranks:
            by_rank = pool(program.ranks).run(run_blocks, name, texts)
        else:
            by_rank = [run_blocks(0, name, texts)]
        for index, block in enumerate(program.blocks):
            yield block, joined([printed[index] for printed in by_rank])


def joined(printed: Sequence[str]) -> str:
    """What a reader sees of the texts of all ranks."""
    if len(set(printed)) == 1 or not any(printed[1:]):
        return printed[0]
    lines = [(rank, line) for rank, text in enumerate(printed) for line in text.splitlines()]
    return "".join(f"rank {rank} | {line}".rstrip() + "\n" for rank, line in lines)


def written(page: str, name: str) -> str:
    """The page with what its blocks print now."""
    end, parts = 0, []
    for block, output in outputs(page, name):
        if not block.is_shown:
            continue
        shown = f"\n\n{PRINTS}{output.rstrip()}\n```" if output.strip() else ""
        parts += [page[end : block.start], _python(page, block), shown]
        end = block.end
    return "".join([*parts, page[end:]])


def _python(page: str, block: Block) -> str:
    head = page[block.start :].partition("\n")[0]
    return f"{head}\n{block.text}```"


def run_blocks(rank: int, name: str, blocks: Sequence[tuple[int, str]]) -> list[str]:
    """What each block prints on this rank; all of them run in a folder that is empty at first."""
    names: dict[str, Any] = {"__name__": "page"}
    plan.clear_plans()  # what earlier programs of the pool have compared is compared again
    with _own_folder(rank), _only_recorded():
        return [_printed(text, line, name, names) for line, text in blocks]


def _only_recorded() -> AbstractContextManager[Any]:
    """Compiled steps run their recorded programs op by op. Pages show these programs, which are the
    same under Inductor, whose C++ compiler would take ten seconds."""
    return nullcontext() if ALL else patch.dict(BACKENDS, inductor=BACKENDS["ops"])


def _printed(text: str, line: int, name: str, names: dict[str, Any]) -> str:
    shifted = "\n" * (line - 1) + text
    linecache.cache[name] = (len(shifted), None, shifted.splitlines(keepends=True), name)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(shifted, name, "exec"), names)  # noqa: S102
    return "".join(f"{line.rstrip()}\n" for line in said.getvalue().splitlines())


@contextlib.contextmanager
def _own_folder(rank: int) -> Iterator[None]:
    """The ranks' working folder is an empty one, the same for all, and is removed afterwards."""
    default = importlib.import_module("mirrored.transports.default")
    before = Path.cwd()
    everyone = tuple(range(default.current().size))
    with tempfile.TemporaryDirectory() as made:
        folder = default.current().gather_objects(made, everyone)[0]
        os.chdir(folder)
        try:
            yield
            default.current().gather_objects(None, everyone)  # nobody uses the folder any more
        finally:
            os.chdir(before)


def not_run(page: str) -> list[tuple[str, str]]:
    """(language, reason) of each block that is not run; the reason is "" where none is given."""
    found: list[tuple[str, str]] = []
    reason = ""
    for match in _FENCE.finditer(page):
        if match["mark"]:
            reason = match["said"] if match["mark"] == "not run" else reason
            continue
        if reason or match["language"] != "python":
            found.append((match["language"], reason))
        reason = ""
    return found
