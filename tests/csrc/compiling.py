"""Compilers and the programs that they make, each with a time limit."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CXX = shutil.which("c++") or shutil.which("g++")
NVCC = shutil.which("nvcc")

_LIMIT_S = 240.0
_NO_RANDOM_ADDRESSES = 0x0040000  # ADDR_NO_RANDOMIZE of personality(2)


def run(*command: object, errors: bool = False) -> str:
    """What the command prints to its standard output, and with `errors` to its other one.

    Its addresses are not random: where the kernel draws them from more bits than a sanitizer's
    shadow memory allows for, a program may crash in the sanitizer's own handler, again and again.

    Raises:
        AssertionError: it fails, or takes longer than 240 s.
    """
    try:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, cwd=ROOT,
            timeout=_LIMIT_S, check=False, preexec_fn=_fix_addresses,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        printed = [text.decode()[-2000:] for text in (late.stdout, late.stderr) if text]
        raise AssertionError(f"{command} has not ended after {_LIMIT_S} s: {printed}") from None
    assert done.returncode == 0, done.stderr
    return done.stdout + (done.stderr if errors else "")


def _fix_addresses() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).personality(
            _NO_RANDOM_ADDRESSES
        )  # a kernel that refuses goes on as it is
