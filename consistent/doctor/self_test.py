"""Self-test: starts two ranks on this host, which try some collectives and a checkpoint.

Ranks that do not end in time are killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding
from .network import free_port

RANKS = 2
LIMIT_S = 60.0  # it takes about 5 s where nothing else runs
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_", "SLURM_")
RANK = "consistent.command.one_rank"
_WARNING_CURE = (
    f"It works, by a slower way. `torchrun --standalone --nproc_per_node {RANKS} -m {RANK}` prints "
    "the whole warning."
)


def check() -> Iterator[Finding]:
    """Run the self-test, and yield what its ranks did, how they reach each other, and warnings."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        error = _run_ranks(folder)
        if error is not None:
            yield error
            return
        results = json.loads(Path(folder, "said").read_text())
        errors = Path(folder, "errors0").read_text(errors="replace").splitlines()
    seconds = time.monotonic() - began
    yield Finding(f"{RANKS} ranks did {', '.join(results['done'])}, in {seconds:.1f} s")
    warnings = [line.partition("Warning: ")[2] for line in errors if "Warning: " in line]
    for line in results["ways"]:
        yield Finding(line)
    for line in warnings:
        yield Finding(line, _WARNING_CURE, optional=True)


def _run_ranks(folder: str) -> Finding | None:
    """Run the ranks until they end; return a finding if one failed or was too slow, else None.

    The ranks write their results and error output to ``folder``.
    """
    port, ranks = free_port(), []
    end = time.monotonic() + LIMIT_S
    # ``signals`` has SIGTERMs, kept for later, since a rank may be starting just now.
    is_late, signals = False, []
    handler = signal.signal(signal.SIGTERM, lambda *arguments: signals.append(arguments))
    try:
        for rank in range(RANKS):
            ranks.append(_start_rank(rank, folder, port))
        # The first rank that fails ends the test: the others would wait for it.
        while (
            not signals
            and any(r.poll() is None for r in ranks)
            and not any(r.poll() for r in ranks)
        ):
            if is_late := time.monotonic() > end:
                break
            time.sleep(0.05)
        failed_rank = next((k for k, r in enumerate(ranks) if r.poll()), None)
    finally:
        _kill_ranks(ranks)
        signal.signal(signal.SIGTERM, handler)
    if signals:
        sys.exit(128 + signal.SIGTERM)
    stage_file = Path(folder, "at")
    stage = stage_file.read_text() if stage_file.exists() else "starting"
    if is_late:
        return Finding(
            f"the self-test has not ended after {LIMIT_S:g} s; it was at: {stage}",
            "If it was at the start, see the host's name above, firewalls for 127.0.0.1, and "
            "GLOO_SOCKET_IFNAME=lo. Else report it, with this output.",
        )
    if failed_rank is None:
        return None
    lines = Path(folder, f"errors{failed_rank}").read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else f"exit status {ranks[failed_rank].returncode}"
    return Finding(
        f"rank {failed_rank} of the self-test failed at: {stage}: {last}",
        f"See what `torchrun --standalone --nproc_per_node {RANKS} -m {RANK}` prints.",
    )


def _start_rank(rank: int, folder: str, port: int) -> subprocess.Popen:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # With the variables of a launcher the ranks would look for the store of its job.
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES)}
    environ = {
        **variables, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "PYTHONPATH": path, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with open(Path(folder, f"errors{rank}"), "w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", RANK, folder], env=environ, stdout=subprocess.DEVNULL,
            stderr=errors, start_new_session=True,
        )  # fmt: skip


def _kill_ranks(ranks: list[subprocess.Popen]) -> None:
    for process in ranks:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the group has the rank's own children, too
        process.wait()
