"""Islands beside data parallelism: the held-out loss after as many steps on as many bytes of text,
and what a rank sends.

    python benchmarks/islands.py [--ranks 2] [--steps 1000] [--every 64] [--seeds 1]

Each way runs once for each seed, which decides the first parameters and the order of the data; the
ratio of losses is taken seed by seed. All train the byte-level model of examples/train_gpt.py with
AdamW on the same number of windows a step. An island is one rank here, and has its own part of the
text. The outer optimizer is SGD with Nesterov momentum, as in DiLoCo; under data parallelism bytes
are those of all messages between ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import train_gpt  # noqa: E402

import consistent  # noqa: E402
from consistent import Placement  # noqa: E402
from consistent.data import loader  # noqa: E402
from mirrored import counting  # noqa: E402

# Arguments of islands.outer.
WAYS: dict[str, dict[str, Any]] = {
    "data": {},
    "islands": {},
    "4 parts, bfloat16": {"parts": 4, "dtype": torch.bfloat16},
    "int8": {"dtype": torch.int8},
}


def train(args: argparse.Namespace) -> dict[str, float]:
    """The held-out loss, and the bytes that this rank sent to others, a step."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    islands = consistent.islands.join(1 if args.way == "data" else size)
    torch.manual_seed(args.seed)
    placement = Placement.all("cpu")
    model = train_gpt.GPT(2, args.width, 4, args.context)
    consistent.parallelize(model, placement, "data")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    options = WAYS[args.way]
    outer = islands.outer(
        model,
        lambda p: torch.optim.SGD(
            p, lr=args.outer_lr, momentum=args.momentum, nesterov=args.momentum > 0
        ),
        every=args.every,
        **options,
    )
    text = train_gpt.sources(1 << 20)
    cut = len(text) * 9 // 10
    data = train_gpt.Windows(text[:cut], args.context)
    test = loader(train_gpt.Windows(text[cut:], args.context), placement, batch_size=64)
    mine = data if args.way == "data" else islands.part(data)
    batch = args.batch if args.way == "data" else args.batch // islands.count
    seed = args.seed * size + islands.number
    batches = loader(mine, placement, batch_size=batch, shuffle=True, seed=seed)
    step, before = 0, outer.sent_bytes
    with counting() as counted:
        while step < args.steps:
            for ids, wanted in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(ids).flatten(0, 1), wanted.flatten()).backward()
                optimizer.step()
                scheduler.step()
                if args.way != "data":
                    outer.step()
                step += 1
                if step == args.steps:
                    break
    if args.way != "data":
        outer.finish()
    inside = sum(call.bytes for call in counted.calls)
    sent = inside if args.way == "data" else outer.sent_bytes - before
    return {"loss": train_gpt.validate(model, test), "bytes": sent / args.steps}


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--ranks", type=int, default=2)
    words.add_argument("--steps", type=int, default=1000)
    words.add_argument("--every", type=int, default=64)
    words.add_argument("--batch", type=int, default=16, help="windows a step, over all ranks")
    words.add_argument("--context", type=int, default=64)
    words.add_argument("--width", type=int, default=64)
    words.add_argument("--outer-lr", type=float, default=0.7)
    words.add_argument("--momentum", type=float, default=0.9, help="of the outer optimizer")
    words.add_argument("--lr", type=float, default=3e-3, help="of the inner optimizer")
    words.add_argument("--seeds", type=int, default=1)
    words.add_argument("--ways", default=";".join(WAYS), help="those to run, with ; between")
    words.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    words.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = words.parse_args()
    torch.set_num_threads(1)
    if args.way:
        found = train(args)
        if os.environ["RANK"] == "0":
            print(json.dumps(found), flush=True)
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    base: list[dict[str, float]] = []
    for way in args.ways.split(";"):
        found = []
        for seed in range(args.seeds):
            done = subprocess.run(
                [*launcher, f"--nproc_per_node={args.ranks}", *sys.argv, "--way", way,
                 "--seed", str(seed)],
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            found.append(json.loads(done.stdout.splitlines()[-1]))
        base = base or found
        losses = [each["loss"] for each in found]
        ratios = [loss / each["loss"] for loss, each in zip(losses, base, strict=True)]
        sent = base[0]["bytes"] / max(1.0, found[0]["bytes"])
        print(
            f"{way:26} held out {statistics.fmean(losses):.4f}, "
            f"ratio {statistics.fmean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})   "
            f"{found[0]['bytes'] / 1e3:9.2f} kB a step (1 / {sent:.1f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
