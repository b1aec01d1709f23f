"""Runs the checks of checks.py one after the other: tests/gpu/run [options] FOLDER [CHECK ...]

Prints one line a check (name, outcome, seconds), and of one that fails the end of its output.
FOLDER/results.txt gets the same lines, FOLDER/log.txt the whole output of all, FOLDER/table.md a
table for docs/gpu.md; each is there as soon as a check has ended. On CUDA the build always comes
first; done before, it takes seconds. --together 8 runs as many at once where cores are to spare,
but none beside one that is timed.

--first and --speeds are lists for half an hour on a GPU: nine minutes each at most, what matters
most first.

CONSISTENT_NCCL names an NCCL library to load before that of torch, such as one that allows several
ranks on one GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.checks import CHECKS, LISTS, MINUTES_9, SECONDS, Check, listed
from tests.gpu.table import Result, write

ROOT = Path(__file__).resolve().parents[2]
NCCL = "CONSISTENT_NCCL"
# Ranks that share a GPU; NVLink's reductions in the switch need one for each.
SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
GRACE = 10.0  # seconds in which a launcher may end its ranks
SHOWN = 25  # lines of a failure
TITLES = {"first": "What matters most", "speeds": "Speeds"}
_WRITING = Lock()  # to the log
LAUNCHER = "distributed/elastic/"  # in the first of many lines that torchrun says about one


def environment(check: Check, device: str, outer: Mapping[str, str]) -> dict[str, str]:
    """That of a check."""
    made = {"GLOO_SOCKET_IFNAME": "lo", **outer, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    made["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), outer.get("PYTHONPATH")]))
    if device == "cuda":
        made["CONSISTENT_CUDA"] = "1"
        if check.ranks > 1 or check.spawns:
            made |= SHARED_GPU | ({"LD_PRELOAD": outer[NCCL]} if outer.get(NCCL) else {})
    return made | check.environment


def run(check: Check, device: str, log: Path, limit: float) -> str:
    """Outcome of a check, whose output goes to ``log``."""
    with log.open("w") as file:
        process = subprocess.Popen(
            check.words(device),
            cwd=ROOT,
            env=environment(check, device, os.environ) | {SECONDS: f"{limit:.0f}"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return "failed" if process.wait(limit) else "passed"
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    """Of what it started nothing stays: a launcher told to end ends its ranks."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, how)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                continue


def chosen(names: Sequence[str], device: str) -> list[Check]:
    """Those of these names, or all, in their order; on CUDA after a build."""
    possible = [check for check in CHECKS if check.on_cpu or device == "cuda"]
    if unknown := set(names) - {check.name for check in possible}:
        known = " ".join(check.name for check in possible)
        raise SystemExit(
            f"run: there is no check {', '.join(sorted(unknown))} on {device}.\n  Known: {known}."
        )
    wanted = {*names, "build"} if names else {check.name for check in possible}
    return [check for check in possible if check.name in wanted]


def run_all(
    checks: Sequence[Check],
    device: str,
    folder: Path,
    seconds: float,
    title: str = "Checks",
    together: int = 1,
) -> list[str]:
    """Names of the checks that did not pass. Each is run if there is time left for it to begin, and
    if it does without the native modules or they were built; up to ``together`` at once, but one
    that is timed by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Result] = {}
    began, is_built = time.monotonic(), True

    def tried(check: Check) -> Result:
        left = seconds - (time.monotonic() - began)
        may_run = is_built or not check.built
        return _result(check, device, folder, left if may_run else 0)

    for group in _groups(checks, together):
        with ThreadPoolExecutor(len(group)) as pool:
            for done in as_completed([pool.submit(tried, check) for check in group]):
                result = done.result()
                results[result.name] = result
                _tell(result, folder)
                in_order = [results[check.name] for check in checks if check.name in results]
                write(folder, title, in_order, title == TITLES["speeds"])
        if "build" in results and results["build"].outcome != "passed":
            is_built = False
    return [name for name, result in results.items() if result.outcome != "passed"]


def _groups(checks: Sequence[Check], together: int) -> list[list[Check]]:
    """The checks that run at once, in order."""
    groups: list[list[Check]] = []
    for check in checks:
        last = groups[-1] if groups else []
        if last and len(last) < together and not (check.alone or last[0].alone):
            last.append(check)
        else:
            groups.append([check])
    return groups


def _result(check: Check, device: str, folder: Path, left: float) -> Result:
    if left <= 0:
        return Result(check.name, "not started", 0.0)
    started, own_log = time.monotonic(), folder / f"{check.name}.log"
    outcome = run(check, device, own_log, min(check.seconds, left))
    text = own_log.read_bytes().decode(errors="replace")
    own_log.unlink()
    with _WRITING, (folder / "log.txt").open("a") as log:
        print(f"\n==== {check.name}: {' '.join(check.words(device))}\n{text}", file=log)
    return Result(check.name, outcome, time.monotonic() - started, own(text.splitlines()))


def _tell(result: Result, folder: Path) -> None:
    line = f"{result.name:22}{result.outcome:14}{result.seconds:6.0f} s"
    print(line, flush=True)
    with (folder / "results.txt").open("a") as file:
        print(line, file=file)
    if result.outcome in ("failed", "out of time"):
        print("".join(f"    {line}\n" for line in result.said[-SHOWN:]), flush=True)


def own(lines: Sequence[str]) -> list[str]:
    """What a program itself said, without what the launcher says of a failure."""
    end = next((k for k, line in enumerate(lines) if LAUNCHER in line), len(lines))
    return list(lines[:end])


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tests/gpu/run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Checks: " + " ".join(check.name for check in CHECKS),
    )
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=1e9, help="for all of them together")
    parser.add_argument("--together", type=int, default=1, help="checks at once that are not timed")
    for name in LISTS:
        parser.add_argument(f"--{name}", dest="list", action="store_const", const=name)
    parser.add_argument("folder", type=Path)
    parser.add_argument("checks", nargs="*", metavar="CHECK")
    asked = parser.parse_args(given)
    seconds, title = asked.seconds, TITLES.get(asked.list, "Checks")
    if asked.list:
        checks = [c for c in listed(asked.list) if c.on_cpu or asked.device == "cuda"]
        seconds = min(seconds, MINUTES_9)
    else:
        checks = chosen(asked.checks, asked.device)
    folder = asked.folder.resolve()
    bad = run_all(checks, asked.device, folder, seconds, title, asked.together)
    print((asked.folder / "table.md").read_text(), flush=True)
    if bad:
        print(f"not passed: {' '.join(bad)}", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
