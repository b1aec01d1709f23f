"""A mixture forward and backward on the ranks of this machine: tokens that are sent to their
experts, beside tokens that every rank has whole, beside experts that every rank has whole, and
beside the expert parallelism of transformers.

    torchrun --nproc_per_node 2 benchmarks/experts.py
    torchrun --nproc_per_node 2 benchmarks/experts.py --tokens 4096 --top 4

Each rank has one thread. The ways take turns, round after round. Times are medians of the slowest
rank's, ratios to the first way; bytes are those of the busiest rank. Of ours the router's gradient,
and under data that of the experts, is summed over ranks; of transformers' nothing is.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import consistent
from benchmarks.op_bytes import Collectives
from consistent import B, S
from mirrored.transports.counting import counting

SENT, WHOLE = "expert, tokens sent", "expert, tokens whole"
DATA, THEIRS = "data", "transformers, all_to_all"
Way = tuple[torch.nn.Module, Any, Callable[[], Any]]


def block(options: argparse.Namespace) -> torch.nn.Module:
    """The mixture of a Mixtral, of which there is one on every rank alike."""
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=options.dim, intermediate_size=options.inner, num_hidden_layers=1,
        num_local_experts=options.experts, num_experts_per_tok=options.top, vocab_size=8,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config).model.layers[0].mlp


def ours(whole: torch.nn.Module, x: torch.Tensor, plan: str, sbp: Any) -> Way:
    placement = consistent.Placement.all("cpu")
    model = consistent.parallelize(copy.deepcopy(whole), placement, plan)
    return model, consistent.distribute(x, placement, sbp).requires_grad_(), counting


def theirs(whole: torch.nn.Module, x: torch.Tensor) -> Way:
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    size, rank = dist.get_world_size(), dist.get_rank()
    shape = {"mesh_shape": (size, 1), "mesh_dim_names": ("ep", "tp")}
    mesh = dist.init_device_mesh("cpu", **shape)
    names = {"experts.gate_up_proj": "grouped_gemm", "experts.down_proj": "grouped_gemm"}
    plan = {**names, "experts": "ep_dispatch_experts"}
    model = apply_expert_parallelism(copy.deepcopy(whole), mesh["ep"], mesh["tp"], plan)
    return model, x.chunk(size)[rank].clone().requires_grad_(), Collectives


def step(model: torch.nn.Module, x: Any) -> None:
    model(x).square().sum().backward()


def seconds(run: Callable[[], Any]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    run()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def largest(n: float) -> int:
    found = torch.tensor(n)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of all ranks")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, whole = dist.get_world_size(), block(options)
    x = torch.randn(size, options.tokens // size, options.dim)
    ways = {
        SENT: ours(whole, x, "expert", S(0)),
        WHOLE: ours(whole, x, "expert", B),
        DATA: ours(whole, x, "data", S(0)),
        THEIRS: theirs(whole, x),
    }
    took, sent = {name: [] for name in ways}, {}
    for k in range(options.rounds + 1):
        for name, (model, given, watch) in ways.items():
            with watch() as log:
                spent = seconds(lambda model=model, given=given: step(model, given))
            sent[name] = log.bytes
            if k:
                took[name].append(spent)
    each = options.top * (size - 1) / size * (options.tokens // size) * options.dim * 4
    for name in ways:
        now, first = statistics.median(took[name]), statistics.median(took[SENT])
        line = f"{name:26} {now * 1e3:8.1f} ms {now / first:6.2f} {largest(sent[name]):12,} bytes"
        if dist.get_rank() == 0:
            print(line)
    if dist.get_rank() == 0:
        print(f"4 x top k (k - 1)/k of the tokens: {int(4 * each):,} bytes where routing is even")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
