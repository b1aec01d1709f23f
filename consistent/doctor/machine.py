"""Checks of the machine: cores, memory, limits, the memory that ranks share, the clock."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, bytes_text

SHARED = Path("/dev/shm")
PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
SEGMENT = 256 << 20  # bytes; two ranks share less than that at first
_FEW_FILES = 1024
_LITTLE_MEMORY = 2 << 30
_SKEW_S = 2.0


def cores() -> int:
    """Return the number of cores that this process may use, by affinity and container limits."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    for text in _container_limits("cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            count = min(count, max(1, int(quota) // int(period)))
    return count


def _container_limits(name: str) -> Iterator[str]:
    """Yield the content of the file ``name`` of this process's cgroup, and of each cgroup above it.

    Such a file, like "cpu.max", has a limit of the container; those of cgroups above apply too. ""
    stands for a missing file.
    """
    lines = (_read_text(PROC / "self/cgroup") or "").splitlines()
    cgroup = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    folder = CGROUP if ".." in cgroup else CGROUP / cgroup  # ".." means a cgroup not mounted here
    while True:
        yield _read_text(folder / name) or ""
        if folder == CGROUP:
            return
        folder = folder.parent


def _cores() -> Iterator[Finding]:
    count = cores()
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local_size) if local_size.isdigit() else 1
    setting = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(setting) if setting.isdigit() else count
    limit = f"OMP_NUM_THREADS={setting}" if setting else "no limit set"
    yield crowded(ranks, threads, count) or Finding(f"{count} cores, {limit}")


def crowded(ranks: int, threads: int, count: int) -> Finding | None:
    """Return a finding if the ranks of this host, or their threads, exceed its cores; else None.

    Args:
        ranks: number of ranks on this host.
        threads: number of threads of each rank.
        count: number of cores that they may use.
    """
    if ranks > count:
        return Finding(
            f"{ranks} ranks share {count} cores, and wait for each other's turns",
            f"Start at most {count} ranks on this host.",
        )
    if ranks * threads > count:
        most_threads = max(1, count // ranks)
        return Finding(
            f"{ranks} rank{'s' if ranks > 1 else ''} of {threads} threads share {count} cores",
            f"Set OMP_NUM_THREADS={most_threads}, or call torch.set_num_threads({most_threads}).",
        )
    return None


def _memory() -> Iterator[Finding]:
    if not hasattr(os, "sysconf"):
        return
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (text for name in ("memory.max", "memory.high") for text in _container_limits(name))
    least = min([total, *(int(text) for text in limits if text.isdigit())])
    message = f"{bytes_text(total)} of memory"
    if least < total:
        message += f", of which this container may use {bytes_text(least)}"
    is_low = least < _LITTLE_MEMORY
    yield Finding(message, "Give it more: torch alone takes 250 MiB a rank." if is_low else "")


def _limits() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # not a Unix
        return
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _FEW_FILES:
        yield Finding(
            f"a process may open {files} files; sockets of ranks and loaders' workers need more",
            f"`ulimit -n {16 * _FEW_FILES}` before the job starts.",
        )
    else:
        yield Finding(f"a process may open {files if files >= 0 else 'any number of'} files")
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        yield Finding(
            f"a process may map {bytes_text(space)} only (ulimit -v)",
            "`ulimit -v unlimited`; bound the memory of a job by its container instead.",
        )


def _shared_memory() -> Iterator[Finding]:
    slower = "ranks of this host will send messages by TCP, about 30 us each and not 4"
    if not SHARED.is_dir():
        yield Finding(
            f"there is no {SHARED}; {slower}",
            "Mount it: `mount -t tmpfs tmpfs /dev/shm`; Docker and Kubernetes have it by default.",
        )
        return
    if not os.access(SHARED, os.W_OK):
        yield Finding(f"{SHARED} cannot be written; {slower}", f"`chmod 1777 {SHARED}`.")
        return
    free = shutil.disk_usage(SHARED).free
    if free < SEGMENT:
        yield Finding(
            f"{SHARED} has {bytes_text(free)} free; {slower}",
            "Make room in it, or start the container with more: `docker run --shm-size=8g`, in "
            "Kubernetes an emptyDir with medium: Memory.",
        )
        return
    yield Finding(f"{SHARED} has {bytes_text(free)} free")


def _dead_segments() -> Iterator[Finding]:
    """Find shared memory segments in /dev/shm whose creators are dead.

    They take memory until the next group of ranks of the same user removes them.
    """
    namespace = _inode(PROC / "self/ns/pid")
    segments = []
    for path in SHARED.glob("consistent-*") if SHARED.is_dir() else ():
        match = re.match(r"consistent-(\d+)-(\d+)-(\d+)-", path.name)
        # The start time tells the creator from a later process with the same pid.
        if match and int(match[1]) == namespace and _start_time(int(match[2])) != int(match[3]):
            segments.append(path)
    if segments:
        size = sum(path.stat().st_blocks * 512 for path in segments)
        yield Finding(
            f"{len(segments)} segments of ranks that are dead take {bytes_text(size)} of {SHARED}",
            f"The next job of their user removes them; or `rm {segments[0]}`"
            + (" and the others." if len(segments) > 1 else "."),
        )


def _start_time(pid: int) -> int:
    """Return when process ``pid`` started, in clock ticks; 0 if it has ended."""
    fields = (_read_text(PROC / str(pid) / "stat") or "").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else 0


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _clock() -> Iterator[Finding]:
    """Check that the clock is plausible and agrees with the times that files get.

    Logs and leases of several hosts are compared by the clock; checkpoints are not.
    """
    with tempfile.TemporaryFile() as file:
        skew = abs(os.fstat(file.fileno()).st_mtime - time.time())
    year = time.gmtime().tm_year
    if year < 2026 or skew > _SKEW_S:
        yield Finding(
            f"the clock says {time.strftime('%Y-%m-%d %H:%M:%S')}, {skew:.1f} s from a file that "
            "was written now",
            "Let the host set its clock: `timedatectl set-ntp true`.",
        )
    else:
        yield Finding(f"the clock says {time.strftime('%Y-%m-%d %H:%M:%S %Z')}")


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


CHECKS = (_cores, _memory, _limits, _shared_memory, _dead_segments, _clock)
