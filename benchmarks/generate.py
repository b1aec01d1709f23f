"""What it costs a small Llama to generate a token, tensor parallel, beside one plain process.

    python benchmarks/generate.py
        one rank: nothing is sent, so this is the overhead of ops that always meet new shapes
    torchrun --nproc_per_node 2 benchmarks/generate.py
        heads and hidden units are split over two ranks; in turn rank 0 runs the plain model alone,
        and then every rank does at once: what it takes more is for the processors to share
    python benchmarks/generate.py --hosts 2
        the same on two hosts: network namespaces, made by root

All run the same model and must generate the same tokens. DTensor is laid out by torch's
`parallelize_module`. On a shared machine only the ratios count.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

import consistent
from benchmarks.gpt import free_port
from benchmarks.hosts import add_option, enter, hosts
from benchmarks.process_group import start
from consistent import B, S

Generate = Callable[[int], torch.Tensor]
AT_ONCE = "plain, at once"
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def generate(model: nn.Module, prompt: torch.Tensor) -> Generate:
    def run(tokens: int) -> torch.Tensor:
        with torch.no_grad():
            return model.generate(prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0)

    return run


def ways(prompt: torch.Tensor) -> dict[str, Generate]:
    """Each kind of tensor's model; the prompt is the same on all ranks."""
    placement = consistent.placement.all("cpu")
    ours = llama()
    plan = {f"*{name}.weight": S(0) for name in COLUMNS}
    plan |= {f"*{name}.weight": S(1) for name in ROWS}
    consistent.parallelize(ours, placement, plan)
    theirs = copy.deepcopy(llama())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in theirs.model.layers:
        for module in (layer.self_attn, layer.mlp):
            names = dict(module.named_children())
            styles = {n: ColwiseParallel() for n in COLUMNS if n in names}
            styles |= {n: RowwiseParallel() for n in ROWS if n in names}
            parallelize_module(module, mesh, styles)
    plain = generate(llama(), prompt)
    at_once = {AT_ONCE: plain} if dist.get_world_size() > 1 else {}
    return {
        "plain": plain,
        **at_once,
        "ours": generate(ours, consistent.distribute(prompt, placement, B)),
        "DTensor": generate(theirs, prompt),
    }


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full() if isinstance(x, consistent.GlobalTensor) else x


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    add_option(parser)
    options = parser.parse_args(given)
    with hosts(options):
        if options.hosts == 1:
            measure(options)
            return
        port, spawn = free_port(), get_context("spawn").Process
        ranks = [spawn(target=on_host, args=(rank, port, options)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


def on_host(rank: int, port: int, options: argparse.Namespace) -> None:
    """A rank of two, each of which is on a host of its own."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0")
    enter(rank, 2)
    measure(options)


def measure(options: argparse.Namespace) -> None:
    """Let all ways generate in turn, on the ranks of this job, and print the times."""
    torch.set_num_threads(1)
    start("cpu")
    prompt = torch.randint(0, 256, (1, 5), generator=torch.Generator().manual_seed(0))
    runs = ways(prompt)
    first = dist.get_rank() == 0
    said = {name: whole(run(8)) for name, run in runs.items()}
    for name, tokens in said.items():
        if first and not torch.equal(tokens, said["plain"]):
            print(f"{name} generates other tokens than the plain model")
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.rounds):
        for name, run in runs.items():
            # The plain model needs no other rank: they wait and leave it the machine.
            if name != "plain" or first:
                taken[name].append(timed_alone(run, options.tokens + turn, name == "plain"))
    if first:
        least = {name: min(times) for name, times in taken.items()}
        for name, each in least.items():
            print(f"{name:14} {each:8.3f} ms a token, {each / least['plain']:.2f}x plain")
    dist.barrier()
    dist.destroy_process_group()


def timed_alone(run: Generate, tokens: int, alone: bool) -> float:
    """Milliseconds for each token. The ranks begin together, unless one of them runs `alone`."""
    if not alone:
        dist.barrier()
    begin = time.perf_counter()
    run(tokens)
    return (time.perf_counter() - begin) / tokens * 1e3


if __name__ == "__main__":
    main()
