"""What it costs that a training survives a death: each step while nothing fails, and a death.

    python benchmarks/surviving.py deaths [--runs 40 --kinds death,two]
    python benchmarks/surviving.py joins
    python benchmarks/surviving.py cost   [--ranks 4 --layers 4 --width 128]
    python benchmarks/surviving.py peers  [--runs 12]
    python benchmarks/surviving.py links

``cost`` trains the model of ``examples/train_gpt.py`` on 2 x 2 ranks (plan data beside zero3), and
on one axis with zero3 and ``peers=True``, in one world: steps with ``commit`` and without it in
turn. It prints the median ratio, a rank's time on a processor in ``commit``, the bytes that a rank
sends in a step and in ``commit``, by kind of call, and the bytes that ranks keep of their own state
and of the rank before.

``deaths`` runs the example on 2 x 2 ranks with dropout, in float64 so that a difference is no
rounding, once undisturbed and then so many times for each kind of disturbance. A random rank gets a
signal at a random place (in a loader, forward, backward, a boxing, the optimizer, the meeting of a
step, a save; in a compiled step, for which it runs the tests' program) or at a random moment. It
prints the seconds from the launcher's word of a loss to the end of the next step, how many runs had
all steps once, each with the loss of the undisturbed run, and where the time of the longest went.

``joins`` goes from 4 ranks to 3, 4, 2 and 4 again with the tests' program, and prints for how long
ranks stand still at each change, and the bytes that came from other ranks.

``peers`` kills a rank of three, with zero3 on one axis, copies and peers' copies after every fourth
step, and no checkpoint; it prints how many steps were run again.

``links`` trains on two hosts (network namespaces), cuts their link for 1, 5 and 30 s and for good,
and prints what each side does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

KINDS = {
    "death": "SIGKILL",
    "two": "two at once",
    "recovery": "a second while the others recover",
    "stop": "SIGSTOP",
}
MOMENT, COMPILED = "any moment", "compiled step"
STEPS = 30
SMALL = (
    "--batch 12 --context 16 --layers 2 --width 32 --heads 2 --bytes 30000 --dropout 0.1 "
    "--check-every 1000000 --save-every 6 --plan dp=data,fsdp=zero3 --seed 0"
).split()


def cost_here(given: argparse.Namespace) -> None:
    """On a rank: train, and print on the first."""
    import torch
    import torch.nn.functional as F

    import consistent
    from consistent.elastic.copies import PeerCopies
    from examples.train_gpt import GPT, Windows, sources
    from mirrored import counting
    from mirrored.every_rank import gather_from_ranks
    from mirrored.transports.default import current

    torch.set_num_threads(1)
    axes = {"dp": -1} if given.peers else {"dp": -1, "fsdp": 2}
    plan = "zero3" if given.peers else {"dp": "data", "fsdp": "zero3"}
    parts = {name: timed(PeerCopies, name) for name in ("prepare", "commit")}

    def train(job: consistent.elastic.Job) -> None:
        torch.manual_seed(0)
        placement = job.placement(axes)
        model = GPT(given.layers, given.width, 4, 128)
        consistent.parallelize(model, placement, plan, verbose=False)
        optimizer = torch.optim.AdamW(model.parameters())
        data = Windows(sources(1 << 20), 128)
        batches = consistent.data.loader(data, placement, batch_size=given.batch, shuffle=True)
        job.keep(model=model, optimizer=optimizer, batches=batches)
        it = iter(batches)

        def step(commits: bool) -> float:
            begin = time.perf_counter()
            ids, wanted = next(it)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids).flatten(0, 1), wanted.flatten())
            loss.backward()
            optimizer.step()
            if commits:
                job.commit()
            return time.perf_counter() - begin

        for _ in range(5):
            step(True)
        sent: dict[bool, Counter[str]] = {}
        for commits in (False, True):
            with counting() as log:
                step(commits)
            sent[commits] = Counter()
            for call in log.calls:
                sent[commits][call.name] += call.bytes
        [times.clear() for times in parts.values()]
        pairs = [
            {commits: step(commits) for commits in ((True, False), (False, True))[k % 2]}
            for k in range(given.rounds)
        ]
        work = {name: gather_from_ranks(statistics.median(times)) for name, times in parts.items()}
        kept = job._copies.last_copy
        assert kept is not None
        shards = sum(x.nbytes for piece, x in kept.pieces.values() if piece.box is not None)
        own, of_peers = zip(*gather_from_ranks(kept.nbytes()))
        shards = gather_from_ranks(shards)
        if current().rank:
            return
        ratios = sorted(pair[True] / pair[False] for pair in pairs)
        without = statistics.median(pair[False] for pair in pairs)
        spent = {name: statistics.mean(seconds) for name, seconds in work.items()}
        print(
            f"{plan}, peers={given.peers}\n"
            f"  a step {without * 1e3:.1f} ms; with commit / without it, of {len(ratios)} pairs of "
            f"steps: median {statistics.median(ratios):.3f}, quartiles "
            f"{ratios[len(ratios) // 4]:.3f} to {ratios[3 * len(ratios) // 4]:.3f}\n"
            f"  a rank's time on a processor in commit: "
            + ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in spent.items())
            + f": {1 + sum(spent.values()) / without:.4f}\n"
            f"  bytes that the first rank sends in a step: {listed(sent[False])}\n"
            f"  and in commit: {listed(sent[True] - sent[False])}\n"
            f"  bytes of copies on each rank: {listed(dict(enumerate(own)))}",
            flush=True,
        )
        if given.peers:
            before = {rank: shards[rank - 1] for rank in range(len(shards))}
            print(
                f"  of the rank before: {listed(dict(enumerate(of_peers)))}\n"
                f"  whose shards are: {listed(before)}",
                flush=True,
            )

    consistent.elastic.run(train, peers=given.peers)


def listed(counts: Mapping[Any, int]) -> str:
    """The numbers with their names, and their sum."""
    each = ", ".join(f"{name}: {count:,}" for name, count in counts.items())
    return f"{each}; together {sum(counts.values()):,}"


def timed(owner: type, name: str) -> list[float]:
    """Let a method note the time of this thread on a processor that each call takes."""
    function, seconds = getattr(owner, name), []

    def call(*args: object) -> object:
        begin = time.thread_time()
        found = function(*args)
        seconds.append(time.thread_time() - begin)
        return found

    setattr(owner, name, call)
    return seconds


def train_here(folder: Path, timeout: float) -> None:
    """On a rank: the example, with places that may be armed; it reads ``sys.argv``."""
    import torch

    import consistent
    from examples import train_gpt
    from tests.consistent.elastic import places
    from tests.consistent.elastic.progress import Progress

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    places.begin(folder)
    places.watched(train_gpt.Windows, "__getitem__", before="loader")
    places.watched(torch.optim.AdamW, "step", before="optimizer")
    places.watched(train_gpt, "layout", before="recovery")
    forward = train_gpt.GPT.forward

    def watched(self: train_gpt.GPT, ids: torch.Tensor) -> torch.Tensor:
        places.at("forward")
        found = forward(self, ids)
        if found.requires_grad:
            found.register_hook(lambda _: places.at("backward"))
        return found

    train_gpt.GPT.forward = watched

    args, log = train_gpt.arguments(), Progress(folder)
    history = consistent.elastic.run(lambda job: train_gpt.train(job, args, log), timeout=timeout)
    losses = [loss for _, loss, _ in history]
    (folder / f"losses.{os.getpid()}").write_text(json.dumps(losses))


def deaths(given: argparse.Namespace) -> None:
    """Run the kinds, and print a table."""
    from tests.consistent.elastic.places import PLACES

    drawn = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = {c: undisturbed(folder / f"alone-{c}", c) for c in (False, True)}
        print(f"{'kind':34}{'equal':>9}{'median s':>10}{'worst s':>9}{'difference':>12}")
        for kind in given.kinds.split(","):
            found = []
            places = [*PLACES, MOMENT, COMPILED]
            runs = given.runs if kind == "death" else min(given.runs, 12)
            for k in range(runs):
                if k % len(places) == 0:
                    drawn.shuffle(places)
                place = places[k % len(places)]
                one = once(folder / f"{kind}-{k}", kind, place, drawn, wanted[place == COMPILED])
                found.append(one)
                if given.verbose or one[1] > 1e-6:
                    print(f"  {kind} {k}: {place}, {one[0]:.2f} s, {one[1]:.1e}", flush=True)
            seconds, differences, parts = zip(*found)
            equal = f"{sum(x <= 1e-6 for x in differences)} of {len(found)}"
            print(
                f"{KINDS[kind]:34}{equal:>9}{statistics.median(seconds):10.2f}"
                f"{max(seconds):9.2f}{max(differences):12.1e}",
                flush=True,
            )
            print(f"  the longest: {parts[seconds.index(max(seconds))]}", flush=True)


def of_peers(given: argparse.Namespace) -> None:
    """Kill a rank of zero3 on one axis, whose shards only the next rank keeps."""
    from tests.consistent.elastic.control import Run, undisturbed

    drawn, again, gaps = random.Random(given.seed), [], []
    options = ("--steps", str(STEPS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = undisturbed(folder / "alone", "--pause", "0", *options)
        for k in range(min(given.runs, 12)):
            zero3 = ("--alone", "--shards", "1", "--peers", "--every", "4")
            run = Run(folder / str(k), 3, *zero3, *options, forked=False)
            at = drawn.randrange(4, 20)
            run.wait_until(lambda: len(run.progress) >= at)  # noqa: B023
            os.kill(drawn.choice(run.ranks), signal.SIGKILL)
            reached = len(run.progress)
            assert run.end() == 0, run.text
            (after,) = re.findall(r"goes on after step (\d+), on 2 ranks", run.text)
            again.append(max(0, reached - int(after)))
            assert len(run.losses()) == 2 and len(run.progress) == STEPS, run.text
            gaps += [abs(x - y) for losses in run.losses() for x, y in zip(losses, wanted)]
    print(
        f"{len(again)} deaths with copies after every fourth step: {statistics.median(again)} "
        f"steps run again (median), at most {max(again)}; no file read; largest difference of a "
        f"loss: {max(gaps):.1e}"
    )


def links() -> None:
    """Cut the link of two hosts."""
    from tests.consistent.elastic.control import undisturbed
    from tests.consistent.elastic.links import cut

    with tempfile.TemporaryDirectory() as name:
        for seconds in (1, 5, 30, None):
            folder = Path(name) / str(seconds)
            with cut(folder, seconds) as found:
                if found is None:
                    raise SystemExit("Network namespaces need root and iproute2.")
                losses = found.first.losses()
                wanted = undisturbed(
                    folder / "alone", "--pause", "0", "--steps", str(len(losses[0]))
                )
                gap = max(abs(x - y) for each in losses for x, y in zip(each, wanted))
                once = [p[0] for p in found.first.progress] == [*range(1, len(wanted) + 1)]
            how = "for good" if seconds is None else f"for {seconds} s"
            print(
                f"cut {how}: {found}; each step {'once' if once else 'NOT ONCE'}, largest "
                f"difference of a loss {gap:.1e}",
                flush=True,
            )


def joins() -> None:
    """Lose one rank, get one, lose two, get two."""
    from tests.consistent.elastic.control import Run, undisturbed

    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name) / "run", 4, launcher=("--max-restarts", "3"), forked=False)

        def wait(size: int) -> None:
            run.wait_until(lambda: bool(run.progress) and run.progress[-1][1] == size)

        wait(4)
        os.kill(run.ranks[1], signal.SIGKILL)
        wait(3)
        wait(4)
        lost = run.ranks[:2]  # which hold all of the model, as the other two do
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        wait(2)
        wait(4)
        count = len(run.progress)
        run.wait_until(lambda: len(run.progress) > count + 3)
        run.stop()
        assert run.end() == 0, run.text
        found, progress = run.losses(), run.progress
        wanted = undisturbed(Path(name) / "alone", "--pause", "0", "--steps", str(len(found[0])))
    gaps = [
        f"{a} -> {b} ranks: {t - s:.2f} s"
        for (_, a, s, _), (_, b, t, _) in zip(progress, progress[1:])
        if a != b
    ]
    print("\n".join(gaps))
    print(*re.findall(r"elastic: (goes on .*)\.", run.text), sep="\n")
    gap = max(abs(x - y) for losses in found for x, y in zip(losses, wanted))
    print(f"{len(wanted)} steps; largest difference of a loss: {gap:.1e}")


def launch(folder: Path, compiled: bool, ranks: int = 4):
    from tests.consistent.elastic.control import Run

    words = ["--steps", str(STEPS)]
    if compiled:
        return Run(folder, ranks, "--compile", "--timeout", "4", *words, forked=False)
    program = (str(Path(__file__)), "train")
    return Run(folder, ranks, *SMALL, *words, "--out", str(folder), program=program, forked=False)


def undisturbed(folder: Path, compiled: bool) -> list[float]:
    run = launch(folder, compiled, ranks=1)
    assert run.end() == 0, run.text
    (losses,) = run.losses()
    return losses


Outcome = tuple[float, float, str]


def once(folder: Path, kind: str, place: str, drawn: random.Random, wanted: list[float]) -> Outcome:
    """Seconds from the word of the loss to the end of the next step, the largest difference of a
    loss, and where the time went; infinite if a step is missing, or was done twice, or a process
    did not come to the end.
    """
    run = launch(folder, place == COMPILED)
    try:
        return disturbed(run, kind, place, drawn, wanted)
    except AssertionError as error:
        print(run.text, repr(error), flush=True)
        return float("inf"), float("inf"), ""
    finally:
        run.kill()


def disturbed(run, kind: str, place: str, drawn: random.Random, wanted: list[float]) -> Outcome:
    """As ``once``, of a launch."""
    at = drawn.randrange(2, STEPS // 2)
    run.wait_until(lambda: len(run.progress) >= at)
    ranks = run.ranks
    by = "SIGSTOP" if kind == "stop" else "SIGKILL"
    began = time.time()
    first = strike(run, place, by, drawn)
    # Every second rank holds the same. Were both of those lost, steps would run again from a file.
    second = ranks[(ranks.index(first) + drawn.choice([1, 3])) % 4]
    if kind == "recovery":
        run.arm("recovery", process=second)
    elif kind == "two":
        os.kill(second, signal.SIGKILL)
    lost = 2 if kind in ("two", "recovery") else 1
    status = run.end(60)
    steps, found = [step for step, *_ in run.progress], run.losses()
    whole = status == 0 and len(found) == 4 - lost and steps == [*range(1, STEPS + 1)]
    if not whole or any(len(losses) != STEPS for losses in found):
        print(run.text, status, steps, found, flush=True)
        return float("inf"), float("inf"), ""
    said = [float(t) for t in re.findall(r"^(\S+) elastic: ", run.text, re.MULTILINE)]
    told = min((t for t in said if t > began), default=began)
    *_, (at, size, parts) = re.findall(
        r"goes on after step (\d+), on (\d) ranks;.*?(\d+\.\d+ s to leave .*)\.", run.text
    )
    assert int(size) == 4 - lost, run.text
    # The line of that step itself may be written late, if the one that was to write it is lost.
    after = next(t for step, _, t, _ in run.progress if step == int(at) + 1)
    pairs = [pair for losses in found for pair in zip(losses, wanted)]
    return after - told, max(abs(loss - other) for loss, other in pairs), parts


def strike(run, place: str, by: str, drawn: random.Random) -> int:
    """Let it happen to a rank, and give its process."""
    process = drawn.choice(run.ranks)
    if place == MOMENT:
        time.sleep(0.3 * drawn.random())
        os.kill(process, getattr(signal, by))
        return process
    name = "boxing" if place == COMPILED else place
    run.arm(name, by)  # the first that comes there
    run.wait_until(lambda: run.is_taken(name), 60)
    return int(next(run.folder.glob(f"{name} *")).name.split()[-1])


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        folder = Path(sys.argv[2])
        del sys.argv[1:3]
        train_here(folder, timeout=4.0)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ["deaths", "joins", "cost", "peers", "links", "rank"]
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60, help="pairs of steps")
    parser.add_argument("--peers", action="store_true", help="zero3 alone, with peers=True")
    parser.add_argument("--runs", type=int, default=40, help="deaths; of other kinds at most 12")
    parser.add_argument("--kinds", default=",".join(KINDS), help="all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="a line of each run")
    given = parser.parse_args()
    if given.what == "rank":
        cost_here(given)
    elif given.what == "deaths":
        deaths(given)
    elif given.what == "joins":
        joins()
    elif given.what == "peers":
        of_peers(given)
    elif given.what == "links":
        links()
    else:
        command = [sys.executable, "-m", "consistent", "run", "--nproc-per-node", str(given.ranks)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        for peers in ([], ["--peers"]):
            words = [*command, __file__, "rank", *sys.argv[2:], *peers]
            subprocess.run(words, env=environment, check=True)


if __name__ == "__main__":
    main()
