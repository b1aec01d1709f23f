"""The ten GPT models of table 1 of Narayanan et al. 2021 (arXiv 2104.04473), simulated on a host
model of A100 GPUs, beside the throughput that the paper measured; and the strategies that a search
finds for them.

    python benchmarks/published.py              all rows
    python benchmarks/published.py --rows 0 9   the first and the last
    python benchmarks/published.py --no-search
    python benchmarks/published.py --zero3      table 2 of the paper, and more and more ranks

Each is an ordinary torch model of that size under tensor and data parallelism inside stages, 1F1B,
recomputation of each block as a whole, bfloat16 with a loss and an optimizer in float32, gradients
that are summed after backward and then clipped; of micro-batch sizes the best one counts. The
paper's program interleaved stages and sent of an activation each rank's part (sections 2.2.2 and
4.1); here stages are not interleaved, and activations are sent as they lie. The same machine
figures serve all rows; they are data-sheet figures and a curve of products
(consistent/auto/machines/known.py). Nothing is allocated or sent. The search is free to choose all
of it, within the 80 GB of a GPU; seconds are those of its process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import consistent
from consistent.autograd import buckets
from consistent.nn.planners import plan_for
from consistent.nn.slots import plain_slots

LENGTH, VOCABULARY = 2048, 51200
# layers, hidden, heads, tensor, stages, GPUs, batch, measured TFLOP/s a GPU
ROWS = (
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (30, 3072, 32, 2, 1, 64, 512, 138),
    (36, 4096, 32, 4, 1, 128, 512, 142),
    (40, 6144, 48, 8, 1, 256, 1024, 135),
    (48, 8192, 64, 8, 2, 512, 1536, 138),
    (60, 10240, 80, 8, 4, 1024, 1792, 140),
    (80, 12288, 96, 8, 8, 1536, 2304, 148),
    (96, 16384, 128, 8, 16, 1920, 2160, 155),
    (105, 20480, 128, 8, 35, 2520, 2520, 163),
    (128, 25600, 160, 8, 64, 3072, 3072, 163),
)

# ZeRO-3 without model parallelism, table 2 of the same paper: layers, hidden, heads, GPUs, batch,
# rows of a micro-batch, measured TFLOP/s a GPU
ZERO3_ROWS = (
    (96, 12288, 96, 384, 1536, 4, 144),
    (96, 12288, 96, 768, 1536, 2, 88),
    (96, 12288, 96, 1536, 1536, 1, 44),
)
# 100 billion parameters at a fixed batch
ZERO3_RANKS = (256, 512, 1024, 2048)


class Block(nn.Module):
    """Attention and an MLP, both after a layer norm."""

    def __init__(self, width: int, heads: int, again: bool) -> None:
        super().__init__()
        self.heads, self.again = heads, again
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if not self.again:
            return self._block(x)
        with set_checkpoint_early_stop(False):  # the paper's program ran the whole block again
            return checkpoint(self._block, x, use_reentrant=False)  # type: ignore[no-any-return]

    def _block(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.out(self._attend(self.norm1(x))), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        # The paper's program did not have flash attention yet: it wrote the scores to memory, with
        # one fused kernel for scale, mask and softmax, for which a softmax stands here.
        scores = F.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), 0.1)
        return (scores @ v).transpose(1, 2).flatten(-2)


class Embedding(nn.Module):
    """Tokens and positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(LENGTH, width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.places(places)


class GPT(nn.Module):
    """Predicts the next token; with ``again`` backward computes each block once more."""

    def __init__(self, layers: int, width: int, heads: int, again: bool = True) -> None:
        super().__init__()
        self.embed = Embedding(width)
        self.blocks = nn.ModuleList(Block(width, heads, again) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over all tokens, in float32 as in the paper's program (Megatron-LM's gpt_model.py:
    ``vocab_parallel_cross_entropy(output.float(), labels)``)."""
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


bfloat16_step = partial(torch.optim.AdamW, fused=True)


def mixed(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW in float32: "all of our results are run with mixed precision" (section 5)."""
    return consistent.master_weights(bfloat16_step(params))


def summed_after_backward() -> AbstractContextManager[Any]:
    """Sum gradients in one flat tensor when backward has ended, as the paper's program did
    (Megatron-LM's distributed.py: ``allreduce_gradients``), not in buckets beside it."""
    sizes = ("FIRST_BUCKET_BYTES", "BUCKET_BYTES", "LEAST_BUCKET_BYTES")
    return mock.patch.multiple(buckets, **dict.fromkeys(sizes, 1 << 50))


def simulated(row: tuple, rows: int, machine: str = "a100-8"):
    """The report of a step with micro-batches of so many rows on each data-parallel rank."""
    layers, width, heads, tensor, stages, gpus, batch, _ = row
    data = gpus // tensor // stages
    with consistent.simulate(ranks=gpus, machine=machine) as sim, summed_after_backward():
        grid = np.arange(gpus).reshape(stages, data, tensor)
        with torch.device("meta"):
            model = GPT(layers, width, heads).to(torch.bfloat16)
        places = [consistent.placement("cuda", part, axes=("dp", "tp")) for part in grid]
        # of the whole model: in a stage of its own a head cannot be told from other layers
        plan = plan_for(model, plain_slots(model), places[0], {"dp": "data", "tp": "tensor"})
        pipe = consistent.nn.pipeline(
            model,
            places,
            loss=loss,
            micro_batches=batch // data // rows,
            plan=plan,
        )
        optimizer = mixed(model.parameters())
        tokens = torch.empty(batch, LENGTH, dtype=torch.long)
        pipe.step(tokens, tokens)
        # Megatron-LM's default (arguments.py: ``--clip-grad``).
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return sim.report()


def simulated_zero3(layers: int, width: int, heads: int, gpus: int, batch: int, rows: int):
    """The report of a step under plan "zero3", with micro-batches of so many rows on each rank."""
    with consistent.simulate(ranks=gpus, machine="a100-8") as sim:
        with torch.device("meta"):
            model = GPT(layers, width, heads).to(torch.bfloat16)
        place = consistent.placement("cuda", range(gpus))
        consistent.parallelize(model, place, "zero3")
        optimizer = mixed(model.parameters())
        tokens = consistent.zeros(
            gpus * rows, LENGTH, dtype=torch.long, placement=place, sbp=consistent.S(0)
        )
        for _ in range(batch // (gpus * rows)):
            loss(model(tokens), tokens).backward()
        optimizer.step()
    return sim.report()


def operations(layers: int, width: int, batch: int) -> float:
    """The paper's count for a step with recomputation, so that both are of the same step."""
    factor = 1 + LENGTH / (6 * width) + VOCABULARY / (16 * layers * width)
    return 96 * batch * LENGTH * layers * width**2 * factor


def zero3() -> None:
    """Table 2 of the paper, and 100 billion parameters on more and more ranks."""
    print("layers/hidden  GPUs  rows  TFLOP/s  paper  seconds  paper  compute  gathers  reductions")
    more = [(80, 10240, 80, gpus, 2048, 2048 // gpus, 0) for gpus in ZERO3_RANKS]
    for layers, width, heads, gpus, batch, rows, measured in (*ZERO3_ROWS, *more):
        made = simulated_zero3(layers, width, heads, gpus, batch, rows)
        spent = {"all_gather": 0.0, "all_to_all": 0.0}
        for span in made.slowest.spans:
            if span.kind == "boxing" and span.name in spent:
                spent[span.name] += span.end - span.begin
        done = operations(layers, width, batch) / gpus / 1e12
        print(
            f"{layers:4} / {width:6} {gpus:6} {rows:5} {done / made.seconds:8.1f} {measured:6} "
            f"{made.seconds:8.1f} {done / measured if measured else 0:6.1f} "
            f"{made.slowest.compute / made.seconds:8.0%}"
            + "".join(f" {seconds / made.seconds:8.0%}" for seconds in spent.values()),
            flush=True,
        )


def searched(row: tuple, machine: str = "a100-8"):
    """(what the search finds for a row, processor seconds that it took)."""
    layers, width, heads, _, _, gpus, batch, _ = row
    with torch.device("meta"):
        model = GPT(layers, width, heads, again=False).to(torch.bfloat16)
        tokens = torch.empty(batch, LENGTH, dtype=torch.long)
    begin = time.process_time()
    found = consistent.search(
        model,
        gpus,
        tokens,
        loss=loss,
        target=tokens,
        machine=machine,
        optimizer=bfloat16_step,
        simulated=2,
    )
    return found, time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=list(range(len(ROWS))))
    parser.add_argument("--micro", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--no-search", action="store_true")
    parser.add_argument("--zero3", action="store_true")
    args = parser.parse_args()
    if args.zero3:
        return zero3()
    errors = []
    print("params  GPUs  tensor stages  rows  bubble  simulated  paper  error  simulating")
    print("        found TFLOP/s  / simulated  peak  search  strategy")
    for i in args.rows:
        row = ROWS[i]
        layers, width, _, tensor, stages, gpus, batch, measured = row
        begin = time.perf_counter()
        best = None
        for rows in args.micro:
            if batch % (gpus // tensor // stages * rows):
                continue
            made = simulated(row, rows)
            if made.peak_bytes <= made.machine.memory_bytes and (
                best is None or made.seconds < best[1].seconds
            ):
                best = rows, made
        if best is None:
            print(f"{layers}/{width}: no micro-batch size fits in memory")
            continue
        rows, made = best
        params = 12 * layers * width**2 + (VOCABULARY + LENGTH) * width
        counted = operations(layers, width, batch)
        tflops = counted / made.seconds / gpus / 1e12
        errors.append(tflops / measured - 1)
        print(
            f"{params / 1e9:5.1f}B {gpus:5} {tensor:7} {stages:6} {rows:5} "
            f"{made.timeline.bubble:7.1%} {tflops:10.1f} {measured:6} {errors[-1]:+6.1%} "
            f"{time.perf_counter() - begin:9.1f} s",
            flush=True,
        )
        if not args.no_search:
            found, took = searched(row)
            first = found.tried[0]
            tflops = counted / first.seconds / gpus / 1e12
            print(
                f"{tflops:21.1f} {made.seconds / first.seconds:11.3f}x "
                f"{first.nbytes / 1e9:5.1f} GB {took:5.1f} s  {first.choice}",
                flush=True,
            )
    if not errors:
        return
    mean = sum(map(abs, errors)) / len(errors)
    print(f"mean error {mean:.1%}, largest {max(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
