"""``import consistent`` brings little more than torch: what only some programs need is imported
when they use it."""

from __future__ import annotations

import subprocess
import sys

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


def test_the_library_and_its_first_tensor_import_nothing_heavy() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import consistent; "
        "consistent.ones(2, placement=consistent.placement('cpu', 0), sbp=consistent.B); "
        "print(*(set(sys.modules) - before))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = ran.stdout.split()
    assert "consistent.nn.parallelize" in found
    later = tuple(f"{name}." for name in (*HEAVY, *LATER))
    brought = [name for name in found if f"{name}.".startswith(later)]
    assert not brought, sorted(brought)


WITHOUT_UNIX = """
import builtins, os, signal, sys, torch
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


def test_nothing_that_only_linux_has_is_needed_to_import_it() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT_UNIX], capture_output=True, text=True)
    assert ran.stdout == "2.0\n", ran.stderr
