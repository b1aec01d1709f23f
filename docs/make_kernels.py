"""Writes docs/kernels.md: what nvcc makes of every kernel. `python docs/make_kernels.py`.

It compiles all kernels for each architecture that setup.py builds for (a few minutes; cubins are
kept in build/sass/), and needs nvcc, nvdisasm and c++filt.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.csrc.compiling import NVCC, run  # noqa: E402
from tests.csrc.sass import Code, Resources, code_of, kept, readable  # noqa: E402
from tests.csrc.steps import COPIED, GPUS, LATENCY_S, Gpu, turn_of  # noqa: E402

PAGE = Path(__file__).with_name("kernels.md")
# The same figures of the sources of 2026-11-24, before their loops were changed, by the same
# compiler. Columns: kernel, architecture, registers, bytes in flight, percent of a copy.
BEFORE = Path(__file__).with_name("kernels_before.csv")


@dataclass(frozen=True)
class Row:
    """A kernel of the tables."""

    name: str
    through: str = ""  # regex of instructions in the iteration: its exponential, once a polynomial
    stores: bool = True
    loop: bool = True  # False if it has none of a fixed length
    was: str = ""  # its name before, if it was renamed


ROWS = "reduce_rows<BFloat16, BFloat16, 8, true>"
EXPONENTIAL = r"MUFU\.EX2|FFMA"
SHOWN = (
    Row("reduce_flat<BFloat16, BFloat16, 8>"),
    Row("reduce_flat<float, float, 4>"),
    Row(
        "reduce_rows<BFloat16, BFloat16, 8, InRegisters<BFloat16, 8, 2, BFloat16> >",
        loop=False,
        was=ROWS,
    ),
    Row("reduce_rows<BFloat16, BFloat16, 8, InShared<BFloat16, 8> >", loop=False, was=ROWS),
    Row("reduce_kernel<BFloat16, 8, sum>"),
    Row("reduce_kernel<BFloat16, 8, max>"),
    Row("reduce_kernel<float, 4, sum>"),
    Row("copy_kernel<16>", loop=False),
    Row(
        "forward_rows<BFloat16, false>",
        EXPONENTIAL,
        stores=False,
        was="forward_rows<BFloat16>",
    ),
    Row("forward_lanes<BFloat16>", loop=False),
    Row("backward_rows<BFloat16>", EXPONENTIAL),
    Row("backward_lanes<BFloat16>", loop=False),
    Row("copy_rows<uint4>", loop=False),
    Row("scale_rows<BFloat16, 8>", loop=False, was="scale_rows<BFloat16>"),
    Row("add_rows<BFloat16, 8>", loop=False, was="add_rows<BFloat16>"),
    Row("bernoulli_kernel<float>", loop=False),
    Row("dropout_kernel<float>"),
    Row("dropout_kernel<BFloat16>"),
    Row("dropout_kernel<Half>"),
    Row("fill_kernel<Uniform<float>, float>"),
    Row("fill_kernel<Uniform<float>, BFloat16>"),
    Row("fill_kernel<Normal<float>, float>"),
    Row("fill_kernel<Normal<float>, BFloat16>"),
    Row("write_kernel<float>", loop=False),
    Row("write_kernel<BFloat16>", loop=False),
    Row("read_kernel<float>", loop=False),
    Row("read_kernel<BFloat16>", loop=False),
)
NAMES = {row.name for row in SHOWN}
Made = dict[str, tuple[Code | None, Resources]]  # name -> code, if it is shown, and resources


def made(arch: int) -> dict[str, Made]:
    """Source -> its kernels, compiled for an architecture."""
    found = {}
    for source in sorted(
        path for path in (ROOT / "csrc").glob("*/*.cu") if path.parent.name != "tests"
    ):
        cubin, resources = kept(source, arch)
        names = readable(list(resources))
        code = code_of(cubin, frozenset(at for at, name in names.items() if name in NAMES))
        found[source.stem] = {name: (code.get(at), resources[at]) for at, name in names.items()}
    return found


def figures(kernels: Made, row: Row, gpu: Gpu) -> tuple[str, str, str]:
    """Registers, bytes in flight, percent of a copy; "" if there is no such kernel or figure."""
    if row.name not in kernels:
        return "", "", ""
    code, resources = kernels[row.name]
    assert code is not None
    turn = turn_of(code, row.through, stores=row.stores, gpu=gpu) if row.loop else None
    share = None if turn is None else turn.share_of_copy(resources.registers, gpu)
    shown = "" if share is None else f"{100 * share:.0f}"
    return str(resources.registers), str(code.in_flight() or "–"), shown


def before() -> dict[tuple[str, int], list[str]]:
    """(kernel, architecture) -> its figures before."""
    with BEFORE.open(newline="") as file:
        return {(name, int(arch)): cells for name, arch, *cells in csv.reader(file)}


def arrow(was: str, now: str) -> str:
    """A cell: one figure if it has not changed, or if there was none before."""
    return f"{was} → {now}" if was and now and was != now else now


def table(first: str, columns: list[str], rows: dict[str, list[str]]) -> Iterator[str]:
    yield f"| {first} | {' | '.join(columns)} |"
    yield "| --- " + "| --: " * len(columns) + "|"
    for name, cells in rows.items():
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def built(by_arch: dict[int, dict[str, Made]]) -> Iterator[str]:
    """The table of all sources: instances, spilled bytes, registers."""
    rows = {}
    for source, kernels in by_arch[90].items():
        functions = {name.partition("<")[0] for name in kernels}
        each = [made[source].values() for made in by_arch.values()]
        most = [max(found.registers for _, found in kernels) for kernels in each]
        spilled = sum(found.spilled for kernels in each for _, found in kernels)
        counts = [str(len(functions)), str(len(kernels)), str(spilled)]
        rows[f"`{source}.cu`"] = [*counts, *map(str, most)]
    columns = ["functions", "instances", "bytes spilled", *(f"sm_{arch}" for arch in by_arch)]
    return table("source", columns, rows)


def page() -> str:
    """The page's text."""
    by_arch = {arch: made(arch) for arch in GPUS}
    found: dict[str, list[list[str]]] = {}
    was = before()
    for row in SHOWN:
        found[f"`{row.name}`"] = [
            list(map(arrow, was.get((row.was or row.name, arch), [""] * 3), now))
            for arch, gpu in GPUS.items()
            for now in [figures(flat(by_arch[arch]), row, gpu)]
        ]
    columns = [f"sm_{arch}" for arch in GPUS]
    lines = [head(), *built(by_arch)]
    for at, title in enumerate(TITLES):
        rows = {name: [cells[at] for cells in each] for name, each in found.items()}
        rows = {name: cells for name, cells in rows.items() if any(cells)}
        lines += [f"## {title}", "", *table("kernel", columns, rows)]
    return "\n".join([*lines, *published()]).rstrip() + "\n"


def flat(made: dict[str, Made]) -> Made:
    return {name: found for kernels in made.values() for name, found in kernels.items()}


TITLES = (
    "Registers per thread",
    "Bytes in flight per thread",
    "Highest possible bandwidth, in percent of a copy",
)


def published() -> Iterator[str]:
    """The GPUs for which the last figures are computed."""
    yield "## The GPUs assumed above"
    yield ""
    rows = {
        f"sm_{arch}": [
            gpu.name, str(gpu.multiprocessors), f"{gpu.hertz / 1e9:g}",
            f"{gpu.bytes_per_s / 1e12:g}", str(gpu.threads),
        ]
        for arch, gpu in GPUS.items()
    }  # fmt: skip
    columns = ["GPU", "multiprocessors", "GHz", "TB/s of memory", "threads per multiprocessor"]
    yield from table("", columns, rows)


def version() -> str:
    return re.findall(r"release [\d.]+, V[\d.]+", run(NVCC, "--version"))[0]


def head() -> str:
    return f"""# What nvcc makes of the kernels

Written by `python docs/make_kernels.py`, with nvcc {version()}.
[Checks on a GPU](gpu.md#what-the-machine-code-says) says what was changed, and what tests limit.
In `a → b`, `a` is from the sources of 2026-11-24, before their loops were changed, and `b` from the
current sources, by the same compiler. A single figure holds for both, or for a kernel that is new.

Registers and spills are those that ptxas prints; loads and stores are read from the machine code.
Bytes in flight are those that a thread has requested from global memory when it first waits; `–`
means that it loads nothing.
**The last table of figures is computed, not measured**: an upper limit for the kernel's bandwidth,
in percent of a copy's, on one GPU of each architecture (listed below the table). It follows from
the bytes in flight, and from the instructions of one iteration of the kernel's loop, counted for
each pipeline (functional unit). A copy is assumed to reach {100 * COPIED:.0f} % of the published
bandwidth, and memory to have a latency of {LATENCY_S * 1e9:.0f} ns. The shortest path is counted:
no activation, no bias, no slow path. Kernels without a loop of fixed length have no row, and a cell
is empty if no such iteration was found.

## All instances

An instance is a kernel for given template arguments. Spilled bytes are summed over all
architectures. The columns `sm_…` have the highest number of registers of any instance in a source.
"""


if __name__ == "__main__":
    PAGE.write_text(page())
