"""What it costs that a training survives a death: each step while nothing fails, and a death.

    python benchmarks/surviving.py cost  [--ranks 4 --layers 4 --width 128]
    python benchmarks/surviving.py kills [--kills 20]

``cost`` trains the model of ``examples/train_gpt.py`` on 2 x 2 ranks (plan data beside zero3) in
one world, blocks of steps with ``commit`` and without it in turn, and prints the median ratio.
``kills`` kills a random rank of the tests' program again and again, and prints the seconds from the
last step before a death to the first one after it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def cost_here(given: argparse.Namespace) -> None:
    """On a rank: train, and print on the first."""
    import torch
    import torch.nn.functional as F

    import consistent
    from examples.train_gpt import GPT, Windows, sources
    from mirrored.transports.default import current

    torch.set_num_threads(1)

    def train(job: consistent.elastic.Job) -> None:
        torch.manual_seed(0)
        placement = job.placement({"dp": -1, "fsdp": 2})
        model = GPT(given.layers, given.width, 4, 128)
        consistent.parallelize(model, placement, {"dp": "data", "fsdp": "zero3"}, verbose=False)
        optimizer = torch.optim.AdamW(model.parameters())
        data = Windows(sources(1 << 20), 128)
        batches = consistent.data.loader(data, placement, batch_size=given.batch, shuffle=True)
        job.keep(model=model, optimizer=optimizer, batches=batches)
        it, ratios, absolute = iter(batches), [], []

        def block(commits: bool) -> float:
            begin = time.perf_counter()
            for _ in range(given.block):
                ids, wanted = next(it)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(ids).flatten(0, 1), wanted.flatten())
                loss.backward()
                optimizer.step()
                if commits:
                    job.commit()
            return (time.perf_counter() - begin) / given.block

        block(True)
        for k in range(given.rounds):
            found = {commits: block(commits) for commits in ((True, False), (False, True))[k % 2]}
            ratios.append(found[True] / found[False])
            absolute.append(found[False])
        if current().rank == 0:
            kept = job._copies.kept
            assert kept is not None
            size = sum(x.nbytes for _, x in kept.pieces.values())
            print(
                f"a step {statistics.median(absolute) * 1e3:.1f} ms; with commit / without: "
                f"median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}; "
                f"a rank's copies {size:,} bytes"
            )

    consistent.elastic.run(train)


def kills(given: argparse.Namespace) -> None:
    """Kill ranks, and say how long the others stood still."""
    from tests.consistent.elastic.control import Run

    with tempfile.TemporaryDirectory() as folder:
        restarts = ("--max-restarts", str(given.kills))
        run = Run(Path(folder) / "run", given.ranks, launcher=restarts)
        drawn, waits = random.Random(given.kills), []
        for _ in range(given.kills):
            run.wait_until(lambda: bool(run.progress) and run.progress[-1][1] == given.ranks)
            count = len(run.progress) + 1 + drawn.randrange(4)
            run.wait_until(lambda: len(run.progress) > count)  # noqa: B023
            before = run.progress[-1][2]
            os.kill(drawn.choice(run.ranks), signal.SIGKILL)
            run.wait_until(lambda: run.progress[-1][1] < given.ranks)
            after = [t for _, size, t, _ in run.progress if size < given.ranks and t > before]
            waits.append(after[0] - before)
        run.stop()
        run.end()
    print(f"{len(waits)} kills: median {statistics.median(waits):.2f} s, worst {max(waits):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["cost", "kills", "rank"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--kills", type=int, default=20)
    given = parser.parse_args()
    if given.what == "rank":
        cost_here(given)
    elif given.what == "kills":
        kills(given)
    else:
        command = [sys.executable, "-m", "consistent", "run", "--nproc-per-node", str(given.ranks)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, __file__, "rank", *sys.argv[2:]], env=environment, check=True)


if __name__ == "__main__":
    main()
