"""``python -m consistent info``: what is installed, how ranks reach each other, what is slow."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from mirrored.comm import Transport
from mirrored.every_rank import gather_from_ranks
from mirrored.transports.base.wrapper import Wrapper
from mirrored.transports.default import current
from mirrored.transports.shared_memory.segments import MAX_RANKS, SWITCH, host, should_share_memory
from mirrored.transports.symmetric_memory import SymmetricMemory
from mirrored.transports.symmetric_memory.transport import MAX_RANKS as MAX_GPUS
from mirrored.transports.torch_dist import TorchDist
from mirrored.transports.tuning import table

from ..doctor.installation import NATIVE, version
from ..spec.bytes_text import bytes_text
from .process import ranks
from .slow import findings


def main(words: list[str]) -> int:
    """Print the report, on the first rank only; return exit status 0.

    ``words``, the arguments of the command, are not used.
    """
    with ranks() as prints:
        lines = list(report())
        if prints:
            print("\n".join(lines))
    return 0


def report() -> Iterator[str]:
    """Yield the lines of the report. A collective of the ranks of the world."""
    installed_version = version("torch-consistent") or "(not installed: imported from its folder)"
    yield f"consistent {installed_version}, in {Path(__file__).parents[1]}"
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield f"torch {torch.__version__} ({cuda}), Python {platform.python_version()}"
    yield from _section("native code", _native_modules())
    yield from _section("GPUs", _gpus())
    yield from _section("ranks", ranks_report())
    yield from _section("slow, and why", findings() or ["nothing that this command knows of"])


def _section(title: str, lines: list[str]) -> Iterator[str]:
    """Yield the lines of one section of the report, below an empty line and its title."""
    yield ""
    yield title
    yield from (f"  {line}" for line in lines)


def _native_modules() -> list[str]:
    lines = []
    for name in NATIVE:
        try:
            file = importlib.import_module(name).__file__
            lines.append(f"{name}: loaded, {bytes_text(Path(file or '').stat().st_size)}")
        except ImportError as error:
            lines.append(f"{name}: MISSING ({error}). Build it with `make build`.")
    return lines


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        why = "" if torch.version.cuda else ": this torch is built without CUDA"
        return [f"none seen{why}"]
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{i}: {gpu.name}, {bytes_text(gpu.total_memory)}" for i, gpu in enumerate(gpus)]


def ranks_report() -> list[str]:
    """Return lines that say how ranks reach each other, and why. A collective of all ranks."""
    transport = current()
    if transport.size == 1:
        free = _shared_memory_text()
        return [
            "this process is the only rank, and sends nothing",
            f"ranks of one host would share memory: {free}"
            if os.environ.get(SWITCH, "1") != "0"
            else f"ranks of one host would send messages, for {SWITCH}=0 is set",
            "to see how ranks reach each other: torchrun --nproc_per_node 2 -m consistent info",
        ]
    world = tuple(range(transport.size))
    allowed, hosts = zip(*gather_from_ranks((should_share_memory(world), host())))
    lines = [f"{transport.size} ranks on {_count_text(len(set(hosts)), 'host')}"]
    if transport.shares(world, "cpu"):  # a collective: all ranks must get here
        way = f"shared memory, for all ranks are on this host ({_shared_memory_text()})"
    elif 1 < len(set(hosts)) < len(world) and all(allowed):
        way = "shared memory inside each host, messages by TCP between hosts"
    else:
        way = f"messages by TCP, for {_message_reason(world, all(allowed), len(set(hosts)))}"
    lines.append(f"CPU tensors: {way}")
    link = transport.link("cpu")
    if link is not None:
        shares = transport.shares(world, "cpu")
        table_path = table.path(len(world), table.cpu_device_name() if shares else table.MESSAGES)
        source = f"table in {table_path}" if table_path.exists() else _missing_table_text(shares)
        lines.append(
            f"plans count {link.latency_s * 1e6:.3g} us a message and "
            f"{bytes_text(link.bytes_per_s)} a second, by the {source}"
        )
    if torch.cuda.is_available():
        lines.append(f"CUDA tensors: {_gpu_transport_text(transport, world, all(allowed), hosts)}")
    return lines


def _missing_table_text(shares: bool) -> str:
    if shares:
        return "built-in table: none was measured yet"
    return "figures of this start: other programs ran meanwhile, so they are not kept"


def _gpu_transport_text(
    transport: Transport, world: tuple[int, ...], allowed: bool, hosts: tuple, kind: str = "cuda"
) -> str:
    """Return how tensors on GPUs travel between ranks, and why not in a faster way.

    A collective of all ranks.

    Args:
        world: all ranks.
        allowed: whether all ranks allow shared memory.
        hosts: the host of each rank.
        kind: type of the device.
    """
    if transport.shares(world, kind):
        return "symmetric memory, for each GPU reads the others'"
    transports = chain(transport)
    messages = transports[-1]
    by_nccl = isinstance(messages, TorchDist) and messages.has_nccl
    way = "NCCL" if by_nccl else "gloo and main memory, for the process group has no NCCL"
    reader = next((t for t in transports if isinstance(t, SymmetricMemory)), None)
    fault = None if reader is None else reader.why_not.get(world)
    if fault is not None:
        why = f"a GPU failed to read the others' memory: {fault}"
    elif len(world) > MAX_GPUS:
        why = f"more than {MAX_GPUS} GPUs do not read each other's memory"
    else:
        why = _message_reason(world, allowed, len(set(hosts)))
    return f"{way}; not symmetric memory, for {why}"


def _message_reason(world: tuple[int, ...], allowed: bool, hosts: int) -> str:
    """Return why ranks send messages instead of sharing memory, as the end of a sentence.

    ``allowed`` is whether all ranks allow shared memory, and ``hosts`` the number of hosts.
    """
    if len(world) > MAX_RANKS:
        return f"more than {MAX_RANKS} ranks do not share one segment"
    if not allowed:
        return f"{SWITCH}=0 is set on some rank"
    if hosts > 1:
        return f"the ranks are on {hosts} hosts"
    return "the ranks could not map memory together; a warning above says why"


def _shared_memory_text() -> str:
    try:
        return f"/dev/shm has {bytes_text(shutil.disk_usage('/dev/shm').free)} free"
    except OSError:
        return "there is no /dev/shm"


def _count_text(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n != 1 else ''}"


def chain(transport: Transport) -> list[Transport]:
    """Return the transport and those that it wraps, outermost first.

    The last one sends messages; the wrappers add faster ways, such as shared memory.
    """
    transports = [transport]
    while isinstance(transports[-1], Wrapper):
        transports.append(transports[-1].inner)
    return transports
