"""The programs csrc/tests/*_test.cu: CUDA against the CPU, then bandwidth; and under
compute-sanitizer, without the bandwidth.

    python -m tests.gpu.programs [--under memcheck|racecheck]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC, BUILT = ROOT / "csrc", ROOT / "build" / "cuda_tests"
FLAGS = "-std=c++17 -O3 -arch=native -fmad=false -Xcompiler -ffp-contract=off".split()
SANITIZED = "compute-sanitizer --error-exitcode 9 --tool".split()


def subjects() -> list[str]:
    """What there is a program for."""
    return sorted(path.stem.removesuffix("_test") for path in (CSRC / "tests").glob("*_test.cu"))


def sources(subject: str) -> list[Path]:
    """What the program's first lines say it is made of."""
    head = (CSRC / "tests" / f"{subject}_test.cu").read_text().partition("#include")[0]
    return [ROOT / name for name in re.findall(r"csrc/\S+\.(?:cu|cpp)\b", head)]


def compiled(subject: str) -> str:
    """What the compiler says against it, "" if nothing. Unchanged sources are not compiled."""
    program = BUILT / subject
    newest = max(path.stat().st_mtime for path in CSRC.rglob("*") if path.is_file())
    if program.exists() and program.stat().st_mtime > newest:
        return ""
    command = ["nvcc", *FLAGS, *map(str, sources(subject)), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return f"{' '.join(command)}\n{done.stdout}{done.stderr}" if done.returncode else ""


def tried(subject: str, tool: str | None) -> bool:
    """Whether it ended well; prints what it said."""
    command = [str(BUILT / subject)]
    if tool:
        command = [*SANITIZED, tool, *command, "untimed"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = f"-- {subject}: status {done.returncode}\n{done.stdout}{done.stderr}"
    print(said, flush=True)
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--under", choices=["memcheck", "racecheck"])
    tool, names = parser.parse_args().under, subjects()
    BUILT.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(names)) as pool:
        faults = list(filter(None, pool.map(compiled, names)))
    if faults:
        sys.exit("\n".join(faults))
    # One that is timed has the GPU for itself.
    with ThreadPoolExecutor(len(names) if tool else 1) as pool:
        sys.exit(not all(list(pool.map(lambda name: tried(name, tool), names))))


if __name__ == "__main__":
    main()
