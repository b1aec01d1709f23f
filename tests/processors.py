"""Runs pytest as other processors do: with the kernels of older ones, on fewer cores.

    python -m tests.processors -n 2 --dist loadfile tests        # arguments of pytest

Three runs set each variable to each of its values once. MKL heeds MKL_ENABLE_INSTRUCTIONS on
processors of Intel only; on others MKL_CBWR picks other kernels. Ends with each run's setting and
closing line, and with status 1 if a run fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """``needs`` is a flag of /proc/cpuinfo, without which the kernels end the process."""

    cores: int
    mkl: str
    aten: str
    onednn: str
    cbwr: str = ""
    needs: str = ""

    def environment(self, intel: bool) -> dict[str, str]:
        made = {
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
            "ATEN_CPU_CAPABILITY": self.aten,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
        }
        return made | ({"MKL_CBWR": self.cbwr} if self.cbwr and not intel else {})


RUNS = (
    Run(1, "SSE4_2", "default", "SSE41", cbwr="COMPATIBLE"),
    Run(2, "AVX2", "avx2", "AVX2", cbwr="AVX2", needs="avx2"),
    Run(4, "AVX512", "avx512", "AVX512_CORE", needs="avx512bw"),
)


def pinned(cores: int) -> list[str]:
    """The words before a command that keep it on so many cores, or on all where there are fewer."""
    if not shutil.which("taskset"):
        return []
    ours = sorted(os.sched_getaffinity(0))[:cores]
    return ["taskset", "-c", ",".join(map(str, ours))]


def run(words: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """(status, last line) of a command whose output is shown as it comes."""
    last = ""
    with subprocess.Popen(
        words, env=os.environ | environment, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode, last


def main(arguments: list[str]) -> int:
    cpuinfo = Path("/proc/cpuinfo")
    said = cpuinfo.read_text() if cpuinfo.exists() else ""
    closing, worst = [], 0
    for each in RUNS:
        environment, before = each.environment("GenuineIntel" in said), pinned(each.cores)
        setting = " ".join([*before, *(f"{k}={v}" for k, v in environment.items())])
        print(f"== {setting}", flush=True)
        if each.needs not in said:
            closing.append(f"{setting}\n  left out: this processor has no {each.needs}")
            continue
        status, last = run([*before, sys.executable, "-m", "pytest", *arguments], environment)
        closing.append(f"{setting}\n  {last}")
        worst = max(worst, status != 0)
    print("\n".join(closing))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
