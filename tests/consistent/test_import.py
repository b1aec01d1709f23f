"""``import consistent`` brings little more than torch: what only some programs need is imported
when they use it."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Each takes a good part of a second, or tens of MB.
HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.onnx",
    "torch.utils.flop_counter",  # brings Triton, which torch has beside CUDA alone
    "triton",
    "sympy",
)
LATER = (
    "consistent.auto",
    "consistent.checkpoint",
    "consistent.compiled.backends.symbolic",
    "consistent.flow",
    "consistent.integrations",
)


FIRST_TENSOR = """
before = set(sys.modules)
import consistent
consistent.ones(2, placement=consistent.placement("cpu", 0), sbp=consistent.B)
print(*(set(sys.modules) - before))
"""


def test_the_library_and_its_first_tensor_import_nothing_heavy(imported: list[str]) -> None:
    found = imported[0].split()
    assert "consistent.nn.parallelize" in found
    later = tuple(f"{name}." for name in (*HEAVY, *LATER))
    brought = [name for name in found if f"{name}.".startswith(later)]
    assert not brought, sorted(brought)


WITHOUT_UNIX = """
import builtins, signal
del os.sched_getaffinity, signal.SIGUSR1, signal.SIGUSR2, os.register_at_fork
sys.modules.update(dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios")))
there = builtins.open
def open_(path, *rest, **named):
    if str(path).startswith(("/proc", "/sys", "/dev/shm")):
        raise FileNotFoundError(path)
    return there(path, *rest, **named)
builtins.open = open_
import consistent, consistent.checkpoint, consistent.auto, consistent.command.main
print(consistent.ones(2, placement=consistent.placement("cpu", 0), sbp=consistent.B).sum().item())
"""


def test_nothing_that_only_linux_has_is_needed_to_import_it(imported: list[str]) -> None:
    assert imported[1] == "2.0\n", imported


# Each program runs in a process that has torch, of which the import takes longest, and not us.
IN_FORKS = """
import os, sys, torch
for program in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(program)
        sys.exit()
    status = os.waitpid(child, 0)[1]
    print("status", os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """What the programs print."""
    words = [sys.executable, "-c", IN_FORKS, FIRST_TENSOR, WITHOUT_UNIX]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    *printed, end = ran.stdout.split("status 0\n")
    assert len(printed) == 2 and not end, (ran.stdout[-2000:], ran.stderr)
    return printed
