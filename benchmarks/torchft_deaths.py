"""The model of examples/train_gpt.py trained by torchft while a rank is killed, beside the same
under ``python -m consistent run``.

    python -m venv --system-site-packages env && env/bin/pip install torchft
    env/bin/python benchmarks/torchft_deaths.py [--ranks 4 --steps 60 --at 20]

Both train the small model of ``benchmarks/surviving.py`` in float64 with 12 windows a step: torchft
under its DistributedDataParallel with one replica group for each rank, over gloo, with the
lighthouse's and the manager's settings of its README and of its train_ddp.py; this library under
the plan "data". Each is run once undisturbed and so many times with ``kill -9`` of one rank. It
prints for how long no step ended after the kill, how many windows a step had from then on, and how
far losses are from those of the undisturbed run: that of each step from then on, over all its
windows, and the one on held-out text after the last step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
BATCH, CONTEXT = 12, 16
Row = tuple[int, float, int, int, float]  # step, time of its end, ranks, windows, mean loss


def torchft_rank(given: argparse.Namespace) -> None:
    """On a rank: what torchft's train_ddp.py does, with this model; one line for each step."""
    import torch
    import torch.nn.functional as F
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
    from torchft import (  # pyright: ignore[reportMissingImports]
        DistributedDataParallel,
        DistributedSampler,
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )

    from examples.train_gpt import GPT, Windows, sources

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    rank, count = given.rank, given.ranks
    text = sources(30_000)
    data = Windows(text[: len(text) * 9 // 10], CONTEXT)
    sampler = DistributedSampler(
        data, replica_rank=rank, num_replica_groups=count, group_rank=0, num_replicas=1,
        shuffle=True, seed=0,
    )  # fmt: skip
    batches = torch.utils.data.DataLoader(data, BATCH // count, sampler=sampler, drop_last=True)
    net = GPT(2, 32, 2, CONTEXT)
    inner = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, given.steps)
    kept: dict[str, Any] = {"model": net, "optimizer": inner, "scheduler": scheduler}

    def load(state: dict[str, Any]) -> None:
        for key, each in kept.items():
            each.load_state_dict(state[key])

    # As a launcher would: a store of this replica group.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1,
        load_state_dict=load, state_dict=lambda: {k: x.state_dict() for k, x in kept.items()},
        replica_id=f"group_{rank}", timeout=timedelta(seconds=30), rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port,
    )  # fmt: skip
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    # Training begins with all of them: a quorum does not wait for a group that is not known yet.
    (given.folder / f"here {rank}").touch()
    while not all((given.folder / f"here {k}").exists() for k in range(count)):
        time.sleep(0.01)
    epoch = 0
    while manager.current_step() < given.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for ids, wanted in batches:
            before = manager.current_step()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids).flatten(0, 1), wanted.flatten())
            loss.backward()
            optimizer.step()
            if done := manager.current_step() > before:
                scheduler.step()
            print(json.dumps([before + 1, time.time(), len(ids), loss.item(), done]), flush=True)
            if manager.current_step() >= given.steps:
                break
    held_out = torch.utils.data.DataLoader(Windows(text[len(text) * 9 // 10 :], CONTEXT), BATCH)
    net.eval()
    total = items = 0
    with torch.no_grad():
        for ids, wanted in held_out:
            total += F.cross_entropy(net(ids).flatten(0, 1), wanted.flatten()).item() * len(ids)
            items += len(ids)
    print(f"held out {total / items:.4f}", flush=True)
    manager.shutdown(wait=False)
    os._exit(0)


def by_torchft(given: argparse.Namespace, kill: bool) -> tuple[list[Row], float, float]:
    """The steps, when the rank was killed, and the loss on held-out text."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lighthouse = subprocess.Popen(
        [str(Path(sys.executable).with_name("torchft_lighthouse")), "--min_replicas", "1",
         "--quorum_tick_ms", "100", "--join_timeout_ms", "10000",
         "--heartbeat_timeout_ms", str(given.heartbeat), "--bind", f"127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    environment = os.environ | {
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name, str(rank)) for rank in range(given.ranks)]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), "--folder", name, *sys.argv[1:]],
                env=environment, stdout=path.open("w"),
                stderr=Path(f"{path}.err").open("w"),
            )
            for rank, path in enumerate(files)
        ]  # fmt: skip
        killed = 0.0
        while any(rank.poll() is None for rank in ranks):
            if kill and not killed and len(_rows(files[0])) >= given.at:
                ranks[-1].send_signal(signal.SIGKILL)
                killed = time.time()
            time.sleep(0.005)
        lighthouse.kill()
        if any(rank.returncode for rank in ranks[:-1]):
            print("\n".join(Path(f"{path}.err").read_text()[-2000:] for path in files))
        held_out = _held_out(files[0].read_text())
        by_step: dict[int, list[Any]] = {}
        for path in files:
            for step, *row, done in _rows(path):
                if done:
                    by_step.setdefault(step, []).append(row)
    return (
        [
            (
                step,
                max(end for end, _, _ in rows),
                len(rows),
                sum(n for _, n, _ in rows),
                sum(n * loss for _, n, loss in rows) / sum(n for _, n, _ in rows),
            )
            for step, rows in sorted(by_step.items())
        ],
        killed,
        held_out,
    )


def _held_out(text: str) -> float:
    return float(re.findall(r"held out ([\d.]+)", text)[-1])


def _rows(path: Path) -> list[Any]:
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("[") and line.endswith("\n")]


def by_ours(given: argparse.Namespace, kill: bool) -> tuple[list[Row], float, float]:
    from tests.consistent.elastic.control import Run

    program = (str(Path(__file__).with_name("surviving.py")), "train")
    words = f"--batch {BATCH} --context {CONTEXT} --layers 2 --width 32 --heads 2 --bytes 30000 "
    words += f"--check-every 1000000 --save-every 1000000 --plan data --steps {given.steps}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        run = Run(
            folder, given.ranks, *words.split(), "--out", str(folder), program=program, forked=False
        )
        killed = 0.0
        if kill:
            run.wait_until(lambda: len(run.progress) >= given.at)
            os.kill(run.ranks[-1], signal.SIGKILL)
            killed = time.time()
        assert run.end() == 0, run.text
        rows = [(step, end, ranks, BATCH, loss) for step, ranks, end, loss in run.progress]
        return rows, killed, _held_out(run.text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--at", type=int, default=20, help="the step after which a rank is killed")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--heartbeat", type=int, default=5000, help="torchft's time-out, ms")
    parser.add_argument("--of", default="torchft,consistent")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        torchft_rank(given)
        return
    runs = {"torchft": by_torchft, "consistent": by_ours}
    for name in given.of.split(","):
        run = runs[name]
        whole, _, wanted = run(given, kill=False)
        losses = {step: loss for step, *_, loss in whole}
        print(f"{name}: undisturbed, {len(whole)} steps, held-out loss {wanted:.4f}", flush=True)
        seconds = []
        for _ in range(given.runs):
            rows, killed, found = run(given, kill=True)
            after = [row for row in rows if row[2] < given.ranks]
            ends = [killed, *(end for _, end, *_ in rows if end > killed)]
            seconds.append(max(b - a for a, b in itertools.pairwise(ends)))
            gap = max(abs(loss - losses[step]) for step, *_, loss in after)
            print(
                f"  killed at step {after[0][0]}: no step ended for {seconds[-1]:.2f} s; "
                f"{len(rows)} steps, {after[-1][3]} windows a step, losses differ by up to "
                f"{gap:.1e}, held-out loss {found:.4f}",
                flush=True,
            )
        print(f"  median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
