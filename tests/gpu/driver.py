"""Runs the checks of checks.py one after the other: tests/gpu/run [options] FOLDER [CHECK ...]

Prints one line a check (name, outcome, seconds), and of one that fails the end of its output.
FOLDER/results.txt gets the same lines, FOLDER/log.txt the whole output of all. On CUDA the build
always comes first; done before, it takes seconds.

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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.checks import CHECKS, Check

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
    """Outcome of a check, whose output goes to the end of ``log``."""
    words = check.words(device)
    with log.open("a") as file:
        print(f"\n==== {check.name}: {' '.join(words)}", file=file, flush=True)
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment(check, device, os.environ),
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


def run_all(checks: Sequence[Check], device: str, folder: Path, seconds: float) -> list[str]:
    """Names of the checks that did not pass. Each is run if there is time left for it to begin."""
    folder.mkdir(parents=True, exist_ok=True)
    log, bad, began = folder / "log.txt", [], time.monotonic()
    for check in checks:
        started, before = time.monotonic(), log.stat().st_size if log.exists() else 0
        left = seconds - (started - began)
        limit = min(check.seconds, left)
        outcome = run(check, device, log, limit) if left > 0 else "not started"
        line = f"{check.name:22}{outcome:14}{time.monotonic() - started:6.0f} s"
        print(line, flush=True)
        with (folder / "results.txt").open("a") as file:
            print(line, file=file)
        if outcome != "passed":
            bad.append(check.name)
        if outcome in ("failed", "out of time"):
            text = log.read_bytes()[before:].decode(errors="replace")
            print("".join(f"    {line}\n" for line in told(text)), flush=True)
        if check.name == "build" and outcome != "passed":
            seconds = 0  # without it nothing else says anything
    return bad


def told(output: str) -> list[str]:
    """The end of what a program itself said."""
    lines = output.splitlines()
    end = next((k for k, line in enumerate(lines) if LAUNCHER in line), len(lines))
    return lines[:end][-SHOWN:]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="tests/gpu/run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Checks: " + " ".join(check.name for check in CHECKS),
    )
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=1e9, help="for all of them together")
    parser.add_argument("folder", type=Path)
    parser.add_argument("checks", nargs="*", metavar="CHECK")
    asked = parser.parse_args(given)
    checks = chosen(asked.checks, asked.device)
    bad = run_all(checks, asked.device, asked.folder.resolve(), asked.seconds)
    if bad:
        print(f"not passed: {' '.join(bad)}", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
