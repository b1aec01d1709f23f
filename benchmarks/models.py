"""Every architecture under every plan: whether a training step is that of one process, the bytes
that it sends, and the ops that ran whole; beside it what DTensor's own ways do.

    python benchmarks/models.py                     all, on 2, 3 and 4 ranks; writes docs/models.md
    python benchmarks/models.py Llama Bert --ranks 2

DTensor's ways are tried on the first number of ranks only.

A step is right if loss, every gradient, and the loss after a step of SGD agree with one process to
1e-5 of the largest element (1e-3 for mixtures, whose products are float32).
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.op_bytes import Collectives
from consistent import Placement
from tests.models.architectures import BATCH, FAMILIES, MODELS, SINGLE
from tests.models.others import OTHERS
from tests.models.steps import alone, step, under, worst
from tests.ranks import RankError, pool

PLANS = ("data", "zero3", "tensor", "tensor+sequence", "hf")
RIVALS = ("tp_plan", "FSDP2")
# Seconds for one step of one model; the first one also imports the library of models.
LIMIT = 300
TARGET = Path(__file__).parents[1] / "docs" / "models.md"


# -- on each rank ----------------------------------------------------------------------------------


def ours(rank: int, name: str, plan: str) -> tuple[float, int, list[str]]:
    """(error, bytes, ops that ran whole) of a step under a plan."""
    _quiet()
    # Nothing is kept, as of large models: these are so small that all of them would be.
    part = plan in ("data", "zero3")
    watched, found = under(name, plan, Placement.all("cpu"), part, keep_bytes=0)
    return worst(found, alone(name))[1], watched.bytes, watched.report.whole


def rival(rank: int, name: str, way: str) -> tuple[float, int, list[str]]:
    """The same of a step by DTensor's own way, which says of no op that it ran whole."""
    _quiet()
    model, inputs = MODELS[name]()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    sent = Collectives()
    if way == "tp_plan":
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        model = apply_tensor_parallelism(model.eval(), mesh, _tp_plan(model))
        if hasattr(model, "tie_weights"):
            model.tie_weights()
        found = step(model, inputs, sent)
    else:
        found = step(_fully_sharded(model.eval(), mesh), _part(inputs), sent)
        losses = torch.stack([found["loss"], found["loss after"]])
        dist.all_reduce(losses)
        found["loss"], found["loss after"] = losses / dist.get_world_size()
    error = worst({key: _full(value) for key, value in found.items()}, alone(name))[1]
    return error, int(sent.bytes), []


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()


def _tp_plan(model: Any) -> dict[str, str]:
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise NotImplementedError("the model carries no plan")
    names = {n for n, _ in model.named_modules()} | {n for n, _ in model.named_parameters()}
    found = model._expand_parallel_plan(plan)
    return {name: style for name, style in found.items() if name in names}


def _fully_sharded(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    for part in reversed(list(model.modules())):  # the innermost first
        if isinstance(part, torch.nn.ModuleList):
            for block in part:
                if any(True for _ in block.parameters()):
                    fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _part(inputs: dict[str, Any]) -> dict[str, Any]:
    size, rank = BATCH // dist.get_world_size(), dist.get_rank()
    return {
        key: x[rank * size : (rank + 1) * size] if isinstance(x, torch.Tensor) else x
        for key, x in inputs.items()
    }


def _full(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


# -- all of them -----------------------------------------------------------------------------------


class Cell:
    """What one way did with one model, on all numbers of ranks."""

    def __init__(self) -> None:
        self.errors: dict[int, str] = {}
        self.bytes = 0
        self.whole: set[str] = set()

    def text(self, ranks: Sequence[int]) -> str:
        """``1,234,567`` or what was wrong, and on how many ranks."""
        kinds = {self.errors.get(n, "") for n in ranks}
        done = f"{self.bytes:,}" if self.bytes else "right"
        if kinds == {""}:
            return done
        if kinds == {"no plan"}:
            return "-"
        wrong = "; ".join(f"{self.errors[n]} on {n}" for n in ranks if n in self.errors)
        return wrong if len(self.errors) == len(ranks) else f"{done}; {wrong}"


def measure(names: Sequence[str], ranks: Sequence[int], out: Path) -> None:
    """Each model by each way on each number of ranks; the page is written after each number."""
    cells = {(name, way): Cell() for name in names for way in (*PLANS, *RIVALS)}
    for n in ranks:
        for (name, way), cell in cells.items():
            if way in RIVALS and n != ranks[0]:
                continue
            _measure_one(cell, name, way, n, ranks[0])
            note = cell.errors.get(n, f"{cell.bytes:,}" if n == ranks[0] else "right")
            print(f"{n} ranks  {name:14} {way:16} {note}", flush=True)
        pool(n).close()
        text = table(cells, ranks[: ranks.index(n) + 1])
        out.write_text(text + _kept(out), encoding="utf-8")


def _kept(out: Path) -> str:
    """The section of the page that ``benchmarks/contexts.py`` writes."""
    heading = "\n## Sequences in parts"
    _, found, rest = (out.read_text(encoding="utf-8") if out.exists() else "").partition(heading)
    return found + rest


def _measure_one(cell: Cell, name: str, way: str, n: int, first: int) -> None:
    step_of = rival if way in RIVALS else ours
    limit = 1e-3 if name in SINGLE else 1e-5
    told(cell, n, first, limit, lambda: pool(n).run(step_of, name, way, timeout=LIMIT))


def told(cell: Cell, n: int, first: int, limit: float, run: Callable[[], list[Any]]) -> None:
    """Enter into ``cell`` what ``run`` says of a step on ``n`` ranks: the error of each, its bytes,
    which count on ``first`` ranks, and the ops that ran whole."""
    try:
        found = run()
        error = max(each[0] for each in found)
        cell.whole |= set(found[0][2])
        if n == first:
            cell.bytes = max(each[1] for each in found)
        if not error < limit:
            cell.errors[n] = f"wrong by {error:.0e}"
    except RankError as stuck:
        cell.errors[n] = "hangs" if "stuck" in str(stuck) else "raises"
    except Exception as error:  # noqa: BLE001 - what it raises is the result
        text = str(error)
        cell.errors[n] = "no plan" if "carries no plan" in text else f"raises {_kind(error)}"


def _kind(error: Exception) -> str:
    return type(error).__name__


_HEAD = (
    "The tables show which models have correct results under which plans, and how many bytes a "
    "rank sends. `benchmarks/models.py` writes them. It builds tiny random models, with their "
    "code unchanged, and runs one training step of each on {shown} ranks. DTensor's own "
    "tensor-parallel plans and FSDP2 run only on {first} ranks.",
    "A number is the bytes that the busiest of {first} ranks sends in the step. It is shown if "
    "the step was correct for every number of ranks, that is, if the loss, every gradient, and the "
    "loss after the step agree with one process. `-` means that the model has no such plan. `hf` "
    "and *tp_plan* are the plan of the model's authors. The column *ran whole* lists ops that ran "
    "on gathered (replicated) inputs under any plan.",
    "At these sizes weights are as large as activations, so the plans send similar amounts; "
    "with larger models the amounts grow differently. FSDP2 keeps the parameters of its root "
    "module (embeddings, heads) from forward to backward. In these runs `zero3` gathers them "
    "again, as it does in large models (`keep_bytes=0`).",
    "Some models store several weights in one layer, one after the other: q, k and v, or a gate "
    "and what it multiplies (GPT2, Phi3, Mpt, ModernBert). Under `tensor` each rank then has a "
    "shard of each of these weights (`S(0, of=...)`), and separating them sends nothing. "
    "CodeGen stores q, k and v in this way in each of four groups of heads. There a rank "
    "exchanges elements that belong to other heads. The plan of Phi3's authors (`hf`) splits "
    "each such layer as one weight.",
    "{others} other architectures of transformers are tested too: all that work with one set of "
    "small sizes (`tests/models/others.py`). On 2 and 3 ranks, under `data`, `zero3`, `tensor` "
    "and `tensor+sequence`, a step of each equals that of one process. Run "
    "`CONSISTENT_TEST_ALL=1 pytest tests/models/test_others.py`.",
    'With `attn_implementation="flex_attention"` all models that support it are correct too, '
    "except for T5 and GptOss, with which plain transformers raises on a CPU. The test covers "
    "rows of one length, padded rows, packed rows and windows, under `data`, `zero3`, `tensor` "
    "and `context` on 2 ranks, 348 steps in all. Plain torch trains none of these models on a "
    "CPU. Run the test with `CONSISTENT_TEST_ALL=1 pytest tests/models/test_flex_attention.py`.",
)


def table(cells: dict[tuple[str, str], Cell], ranks: Sequence[int]) -> str:
    """The page."""
    shown = ", ".join(map(str, ranks))
    head = ["model", *PLANS, "ran whole", *(f"DTensor: {way}" for way in RIVALS)]
    lines = ["# Models under plans", ""]
    for text in _HEAD:
        lines += [fill(text.format(shown=shown, first=ranks[0], others=len(OTHERS)), 150), ""]
    for family, models in FAMILIES.items():
        mine = [name for name in models if (name, PLANS[0]) in cells]
        if not mine:
            continue
        lines += [f"## {family}", "", row_of(head), row_of(["---"] * len(head))]
        for name in mine:
            whole = sorted(set().union(*(cells[name, plan].whole for plan in PLANS)))
            row = [name, *(cells[name, plan].text(ranks) for plan in PLANS)]
            row += [", ".join(f"`{op}`" for op in whole) or ""]
            lines.append(row_of([*row, *(cells[name, way].text(ranks[:1]) for way in RIVALS)]))
        lines.append("")
    counts = [_count(cells, way, ranks) for way in (*PLANS, *RIVALS)]
    lines += ["## Correct", "", row_of(["", *PLANS, *RIVALS]), row_of(["---"] * (len(counts) + 1))]
    lines.append(row_of(["correct, of the models with that plan", *counts]))
    return "\n".join(lines) + "\n"


def _count(cells: dict[tuple[str, str], Cell], way: str, ranks: Sequence[int]) -> str:
    mine = [cell for (_, w), cell in cells.items() if w == way]
    asked = [cell for cell in mine if set(cell.errors.values()) != {"no plan"}]
    return f"{sum(not cell.errors for cell in asked)} of {len(asked)}"


def row_of(cells: Sequence[str]) -> str:
    """A row of a table of Markdown."""
    return "| " + " | ".join(cells) + " |"


def run(
    description: str | None, models: Iterable[str], measure: Callable[[Any, Any, Path], None]
) -> None:
    """Measure, print and write what the command line asks for: ``measure(models, ranks, page)``."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(models), help="all by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--out", type=Path, default=TARGET)
    given = parser.parse_args()
    measure(given.models, given.ranks, given.out)
    print(f"written to {given.out}")


if __name__ == "__main__":
    run(__doc__, MODELS, measure)
