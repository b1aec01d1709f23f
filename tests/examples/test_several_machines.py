"""Launches on two machines of two ranks: the documents' own, and those of examples/launch/."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ALL

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "examples" / "two_hosts.sh"
LAUNCH = ROOT / "examples" / "launch"

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


def finished(
    command: list[str], path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """How a command ended, with the commands of this Python and those in ``path`` at hand."""
    folders = [*([str(path)] if path else []), str(Path(sys.executable).parent)]
    variables["PATH"] = os.pathsep.join([*folders, os.environ["PATH"]])
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment() | {"RANKS_PER_HOST": "2"} | variables,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def check(printed: str) -> None:
    """Four ranks said the same."""
    found = re.findall(
        r'2 machines, \(4, 3\), placement\("cpu", ranks=\[3\]\), sum -?[0-9.]+\.\n', printed
    )
    assert len(found) == 4 and len(set(found)) == 1, printed


def agents_on_loopback(program: Path) -> None:
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


# Torch's own, whose ranks are forks of it.
TORCHRUN = f"""#!/bin/sh
exec {sys.executable} -m tests.forked_ranks torch.distributed.run "$@"
"""


def test_two_hosts(tmp_path: Path) -> None:
    """They have addresses of their own, where namespaces of networks can be made."""
    program = tmp_path / "test.py"
    program.write_text(PROGRAM)
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(TORCHRUN)
    torchrun.chmod(0o755)
    command = f"exec {LAUNCH}/each_host.sh $HOST 2 $FIRST {program}"
    done = finished([str(SCRIPT), "bash", "-c", command], tmp_path, MASTER_PORT="7788")
    if ALL or done.returncode == 77:
        agents_on_loopback(program)
    if done.returncode == 77:
        pytest.skip(f"not with addresses of their own: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout)


# Stand-ins for commands of Slurm, on a machine that stands for two hosts, and for torchrun.
COMMANDS = {
    "scontrol": """[ "$*" = "show hostnames host[0-1]" ] && printf '10.0.0.7\\n10.0.0.8\\n'""",
    "srun": """shift; for k in 0 1; do SLURM_NODEID=$k "$@" || exit; done""",
    "torchrun": """echo "$OMP_NUM_THREADS threads, $*" """,
}


def test_a_job_of_slurm_starts_torchrun_on_each_host(tmp_path: Path) -> None:
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_ID": "20042", "JOB_NODELIST": "host[0-1]", "NNODES": "2", "CPUS_PER_TASK": "8"}
    given = {f"SLURM_{name}": value for name, value in slurm.items()}
    done = finished([str(LAUNCH / "job.sbatch"), "a.py", "--plan", "zero3"], tmp_path, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        f"4 threads, --nnodes=2 --node_rank={k} --nproc_per_node=2 --master_addr=10.0.0.7 "
        "--master_port=10042 a.py --plan zero3"
        for k in range(2)
    ]


def test_the_manifest_has_what_the_operator_looks_for() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1 and set(replicas) == {"Master", "Worker"}
    for each in replicas.values():
        (container,) = each["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert (ROOT / container["command"][1]).is_file()
        assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]
