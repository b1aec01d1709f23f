"""Writes docs/wrong_elsewhere.md from the results of the programs of tests/reported:
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

{count} public reports of wrong results or errors in other libraries. For each there is a short program of our own, which `tests/reported/` runs on one process and on {ranks} ranks. `python docs/make_wrong_elsewhere.py` writes this page from the results.

* **This library**: {right} programs give the values and gradients of one process, on every rank. {refused} cannot give correct values as it is written, so it raises on every rank, with what to do instead.
* **PyTorch**: {reproduced} programs also run with torch {version}'s own DTensor, FSDP2, DDP, samplers and pipelines. {wrong} give wrong numbers without an error, {raise} raise where one process works, and {mended} are correct ("right"): PyTorch has fixed the faults reported for it, and DTensor does not have those of the other library. The remaining programs would need the other library or GPUs, or leave ranks waiting, so the table refers to the report.

*Off by* is the largest difference from one process, relative to the largest element of the tensor. [What was reported elsewhere](reported.md) groups the faults that were found here into kinds, with the tests of each kind.
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
    """The numbers in the head of the page."""
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
        yield f"| report | reported fault | torch {counts()['version']}, in the same run | our program |"
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
    """How the program ended with torch's own classes: the worst outcome of all ranks."""
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
