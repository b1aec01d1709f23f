"""Writes docs/wrong_elsewhere.md from what the programs of tests/reported give:
`python docs/make_wrong_elsewhere.py`."""

# ruff: noqa: E501 - lines of Markdown

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.reported.report import REPORTS, Report  # noqa: E402
from tests.reported.run import RANKS, Outcome, outcomes  # noqa: E402

PAGE = ROOT / "docs" / "wrong_elsewhere.md"

_HEAD = """# Wrong elsewhere, right here

{count} public reports of other libraries by their numbers, each with a short program of our own, which `tests/reported/` runs on one process and on {ranks} ranks. Written by `python docs/make_wrong_elsewhere.py` from what they give.

* **Here** {right} have the values and gradients of one process, on every rank. {refused} cannot be right as it is written, and raises on every rank with what to do instead.
* **There**: {reproduced} run beside it with torch {version} itself, by DTensor, FSDP2, DDP, its samplers and its pipelines. {wrong} of them give wrong numbers without a word, {raise} raise where one process works, and {mended} are right: PyTorch's own have been mended since, and what another library got wrong DTensor gets right. The rest would need that library or GPUs, or leave ranks waiting: there the report says what happens.

*Off by* is the largest difference, relative to the largest element of its tensor. [What was reported elsewhere](reported.md) has the kinds that such reports led to here, and the tests of each kind.
"""

_LIBRARIES = {
    "PyTorch": ("pytorch/pytorch",),
    "torchtitan": ("pytorch/torchtitan",),
    "transformers, accelerate, Lightning": (
        "huggingface/transformers",
        "huggingface/accelerate",
        "Lightning-AI/pytorch-lightning",
    ),
    "Megatron-LM": ("NVIDIA/Megatron-LM",),
    "JAX": ("jax-ml/jax",),
    "OneFlow": ("Oneflow-Inc/oneflow",),
}


def page() -> str:
    """The whole document."""
    return "\n".join([_HEAD.format(**counts()), *_tables()])


def counts() -> dict[str, object]:
    """What the head of the page says."""
    there = {each.name: said_there(each) for each in REPORTS if each.there}
    return {
        "count": len(REPORTS),
        "ranks": RANKS,
        "right": sum(each.refused is None for each in REPORTS),
        "refused": sum(each.refused is not None for each in REPORTS),
        "version": ".".join(torch.__version__.split(".")[:2]),
        "reproduced": len(there),
        "wrong": sum(not said.startswith(("right", "raises")) for said in there.values()),
        "raise": sum(said.startswith("raises") for said in there.values()),
        "mended": sum(said.startswith("right") for said in there.values()),
    }


def _tables() -> Iterator[str]:
    for title, repositories in _LIBRARIES.items():
        reports = [each for each in REPORTS if each.repository in repositories]
        reports.sort(key=lambda each: (repositories.index(each.repository), each.number))
        yield f"## {title}\n"
        yield f"| report | what it says | torch {counts()['version']}, in the same run | our program |"
        yield "| --- | --- | --- | --- |"
        yield from map(row, reports)
        yield ""


def row(entry: Report) -> str:
    """One line of a table."""
    address = f"https://github.com/{entry.repository}/issues/{entry.number}"
    report = f"[{entry.name}]({address}): {_cell(entry.title)}"
    program = f"`{entry.program.__name__}` in `{entry.place}`"
    if entry.refused is not None:
        program += f": raises `{entry.refused.__name__}`"
    return f"| {report} | {_cell(entry.said)} | {said_there(entry)} | {program} |"


def said_there(entry: Report) -> str:
    """How it ended with torch's own; the worst of the ranks."""
    if entry.there is None:
        return "as the report says"
    return max((_there(each) for each in outcomes()[entry.name]), key=_size)


def _there(outcome: Outcome) -> str:
    return outcome.there or "right"


def _size(said: str) -> float:
    words = said.split()
    return float(words[2]) if said.startswith("off by") else float(not said.startswith("right"))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    PAGE.write_text(page().rstrip() + "\n")


if __name__ == "__main__":
    main()
