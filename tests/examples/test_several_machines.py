"""The documents' launch on two machines of two ranks: on loopback, and between two hosts."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "examples" / "two_hosts.sh"

# What the documents' four-rank program does, and where each rank is.
PROGRAM = """
import consistent.flow as flow

P01 = flow.placement(type="cpu", ranks=[0, 1])
P23 = flow.placement(type="cpu", ranks=[2, 3])
x = flow.randn(4, 5, placement=P01, sbp=flow.sbp.split(dim=0))
w = flow.randn(5, 3, placement=P23, sbp=flow.sbp.split(dim=1))
out = flow.matmul(x.to_global(placement=P23, sbp=flow.sbp.broadcast), w)
with flow.scope.placement("cpu", "1:1"):
    last = flow.ones(1).placement
machines, total = flow.config.machines(), out.sum().item()
print(f"{machines} machines, {tuple(out.shape)}, {last}, sum {total:.6f}.\\n", end="", flush=True)
"""


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHON": sys.executable,
    }


def check(printed: str) -> None:
    """Four ranks said the same."""
    found = re.findall(
        r'2 machines, \(4, 3\), placement\("cpu", ranks=\[3\]\), sum -?[0-9.]+\.\n', printed
    )
    assert len(found) == 4 and len(set(found)) == 1, printed


def test_two_agents_on_loopback(tmp_path: Path) -> None:
    program = tmp_path / "test.py"
    program.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "consistent.flow.distributed.launch"]
    options = ["--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    agents = [
        subprocess.Popen(
            [*launcher, "--nnodes=2", f"--node_rank={k}", *options, str(program)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for k in range(2)
    ]
    try:
        printed = "".join(agent.communicate(timeout=120)[0] for agent in agents)
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], printed
    check(printed)


def test_two_hosts_with_addresses_of_their_own(tmp_path: Path) -> None:
    program = tmp_path / "test.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [str(SCRIPT), str(program)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout)
