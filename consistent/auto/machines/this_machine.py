"""``machine("this")``: the CPU of this host, measured.

An op costs what the same call took here, on real tensors of its sizes, strides and dtypes. Figures
and calls are measured once and kept in the user's cache folder, in a file for each model of CPU,
version of torch and number of threads (``measurement_cache.py``), so that all processes of the host
use the same figures. The costs of messages come from the table of this host
(``mirrored/transports/tuning/``), by which real ranks choose the sizes of messages. The table has
one entry for ranks that share memory, and one for messages, which ranks on several hosts measured
when they last ran.
"""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mirrored.comm import Link
from mirrored.transports.default import current
from mirrored.transports.shared_memory.segments import is_switched_on
from mirrored.transports.tuning import table
from mirrored.transports.tuning.link import stored_link

from ...cost_model.built_in import BUILT_IN
from ...cost_model.messages import Wire
from ...cost_model.model import Caller, Ranks
from ...cost_model.work import Work
from ...dispatch.planning.without_modes import without_modes
from . import replay
from .background_load import BackgroundLoad
from .host_speed import USUAL_S, HostSpeed, fixed_seconds
from .machine import Machine
from .measurement_cache import MeasurementCache, folder
from .op_signature import OpSignature
from .stopwatch import typical_seconds

HOST_SAMPLES = 5  # measurements, of which the median counts
_FULL_EFFICIENCY = ((1e-9, 1.0),)  # efficiency 1 throughout: the peak rate is itself measured


@dataclass(frozen=True)
class ThisMachine(Machine):
    """Machine whose ops are timed on this host, by making each call again.

    ``dataclasses.replace(machine("this"), hosts=2)`` describes two hosts like this one: ranks are
    distributed over both, and messages between ranks of different hosts use the network.

    Args:
        measurements: cache of measured seconds by call.
        background_load: background processes that keep the other cores busy while a call is timed.
        host_speed: present speed of the host, by which measured times are corrected; None: they are
            not.
        ranks_per_core: ranks per core, at least 1; times of ops are multiplied by it.
        hosts: number of hosts.
    """

    measurements: MeasurementCache = field(
        default_factory=lambda: MeasurementCache(measurements_path()), compare=False, repr=False
    )
    background_load: BackgroundLoad = field(
        default_factory=lambda: BackgroundLoad(_cores() - 1), compare=False, repr=False
    )
    host_speed: HostSpeed | None = field(default=None, compare=False, repr=False)
    ranks_per_core: float = 1.0  # ranks per core
    hosts: int = 1

    @property
    def shares_memory(self) -> bool:
        """True if ranks read each other's memory; False if CONSISTENT_SHARED_MEMORY=0."""
        return is_switched_on()

    def of(self, ranks: int) -> ThisMachine:
        """Return the machine for a world of ``ranks`` ranks, distributed over its hosts.

        If a host has more ranks than cores, they take turns: with two ranks per core, each op takes
        twice as long.
        """
        ranks_here = -(-ranks // self.hosts)
        if ranks_here <= self.ranks_per_host and self.hosts == 1:
            return self
        times = max(1.0, ranks_here / self.ranks_per_host)
        seconds = self.host_seconds * times
        return replace(self, ranks_per_host=ranks_here, host_seconds=seconds, ranks_per_core=times)

    def message_host_seconds(self, caller: Caller, tensors: int = 1) -> float:
        """Return the seconds of Python for a message that carries ``tensors`` tensors.

        Where ranks outnumber cores, they take turns, so it takes ``ranks_per_core`` times as long.
        """
        return super().message_host_seconds(caller, tensors) * self.ranks_per_core

    @property
    def cache_bytes(self) -> float:
        return replay.cache_bytes() / self.background_load.ranks

    def op_seconds(self, work: Work, cold: float = 0.0) -> float:
        """Return the seconds that the call described by ``work`` takes here.

        A call that cannot be made again is estimated from its bytes and flops. A call that would
        take too much memory or time is timed with a smaller leading dim, and its time is scaled by
        the ratio of the estimates.

        Args:
            cold: share of the bytes of its inputs that no cache holds, from 0 to 1.
        """
        if not isinstance(work.key, OpSignature) or work.key.op == "view":  # a simulated view
            return super().op_seconds(work) * self.ranks_per_core
        seconds = self._cached_seconds(work, work.key, False)
        if seconds is None:
            return super().op_seconds(work) * self.ranks_per_core
        if cold:
            seconds += cold * self._cold_extra_seconds(work, work.key, seconds)
        return seconds * self.ranks_per_core

    def _cold_extra_seconds(self, work: Work, call: OpSignature, warm: float) -> float:
        """Return how many seconds longer the call takes if its tensors are in no cache.

        ``warm`` are its seconds on cached tensors. The result is between 0 and the time to read and
        write all the tensors.
        """
        extra = (self._cached_seconds(work, call, True) or warm) - warm
        return max(0.0, min(extra, self.touch_seconds(work)))

    def _cached_seconds(self, work: Work, call: OpSignature, cold: bool) -> float | None:
        name = _call_key(call)
        if cold:
            name = f"cold: {name}"
        return self.measurements.get(name, partial(self._measured_seconds, work, call, cold))

    def follow_seconds(self, work: Work) -> float:
        """Return the seconds of Python that an op takes on a rank outside the op's placement.

        Such a rank runs the op on ``meta`` tensors. The time is measured, because some ops consist
        of many Python calls on ``meta``.
        """
        seconds = 0.0
        if isinstance(work.key, OpSignature) and work.key.op != "view":
            name = f"on meta: {_call_key(work.key)}"
            seconds = self.measurements.get(name, partial(_seconds_on_meta, work.key)) or 0.0
        return self.host_seconds + seconds * self.ranks_per_core

    def _measured_seconds(self, work: Work, call: OpSignature, cold: bool) -> float | None:
        try:
            if self._can_replay(work):
                return self._time_call(call, cold)
            for times in (2**k for k in range(1, 20)):
                shrunk_work = replay.work_on_meta(replay.shrink_call(call, times))
                if self._can_replay(shrunk_work):
                    growth = super().op_seconds(work) / super().op_seconds(shrunk_work)
                    return self._time_call(replay.shrink_call(call, times), cold) * growth
        except replay.CannotReplay:
            pass
        return None

    def _time_call(self, call: OpSignature, cold: bool) -> float:
        """Time the call here while the other cores make it too, as in a job that uses all cores.

        The time is converted to the usual speed of the host.
        """
        if self.host_speed is not None and not self.host_speed.is_known:
            _measure_speed(self.host_speed, self.background_load)
        with self.background_load.while_making(call, cold):
            seconds = replay.time_call(call, cold)
        return seconds if self.host_speed is None else self.host_speed.at_usual_speed(seconds)

    def _can_replay(self, work: Work) -> bool:
        """Return whether the call is small enough, in memory and time, to be made on this host."""
        assert isinstance(work.key, OpSignature)
        if replay.bytes_needed(work.key) > replay.MAX_BYTES:
            return False
        return super().op_seconds(work) <= replay.MAX_SECONDS

    def link(self, ranks: int) -> Link:
        """Return the bandwidth and latency of messages between ``ranks`` ranks.

        Programs choose the sizes of messages by them. The link also has the rate of local copies.
        """
        return self._link_between(tuple(range(ranks))) if ranks > 1 else super().link(ranks)

    def _link_between(self, ranks: Ranks) -> Link:
        one_host = len({rank // self.ranks_per_host for rank in ranks}) == 1
        return (_shared_memory_link if one_host and self.shares_memory else _network_link)(
            len(ranks)
        )

    def message_seconds(self, name: str, nbytes: int, ranks: Ranks) -> float:
        """Return the seconds of a communication between ``ranks``, from latency and bandwidth.

        The number of cores does not matter. The figures are those of ``link``.

        Args:
            name: the communication, such as "all_reduce".
            nbytes: bytes that the busiest of the ranks sends.
        """
        if len(ranks) < 2:
            return 0.0
        super().message_seconds(name, 0, ranks)  # raises for unknown names
        link = self._link_between(ranks)
        return link.latency_s + nbytes / link.bytes_per_s


@lru_cache
def _shared_memory_link(ranks: int) -> Link:
    return stored_link(ranks, table.cpu_device_name(), True) or table.Table().link


@lru_cache
def _network_link(ranks: int) -> Link:
    """Return bandwidth and latency of messages between ranks that do not share memory.

    They are those that ``ranks`` ranks last measured, or built-in figures if there are none.
    """
    cpu = BUILT_IN["cpu"]
    measured = table.load_stored(ranks, table.MESSAGES)
    return Link(cpu.latency, cpu.bandwidth) if measured is None else measured.link


@lru_cache(1 << 14)
def _call_key(call: OpSignature) -> str:
    # Without ``out``, which op and arguments determine.
    text = hashlib.sha256(repr(call[:3]).encode()).hexdigest()[:24]
    return f"{call.op} {text}"


def measurements_path() -> Path:
    """Return the file in which the measurements of this host are cached."""
    threads = f"{torch.get_num_threads()} threads"
    name = f"machine {cpu_model()} torch {torch.__version__} {threads} paced.jsonl"
    return folder() / "-".join(name.replace("/", " ").split())


@lru_cache
def cpu_model() -> str:
    """Return the number of cores and the model of the CPU, such as "8 AMD EPYC 7763"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{os.cpu_count()} {model.strip()}"


def this_machine() -> ThisMachine:
    """Return this host's CPU as a machine; the first call on a host takes a few seconds."""
    cache, ranks = MeasurementCache(measurements_path()), os.cpu_count() or 1

    def figure(name: str, measure: Callable[[], float]) -> float:
        value = cache.get(name, measure)
        assert value is not None
        return value

    link, between = _shared_memory_link(max(ranks, 2)), _network_link(max(ranks, 2))
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    with without_modes():
        background_load = BackgroundLoad(_cores() - 1)

        host_speed = HostSpeed(figure("fixed calls s", partial(_usual_seconds, background_load)))

        def host_s() -> float:
            samples = []
            for _ in range(HOST_SAMPLES):
                _measure_speed(host_speed, background_load)
                samples.append(host_speed.at_usual_speed(_host_seconds()))
            return statistics.median(samples)

        copies = link.copy_bytes_per_s
        return ThisMachine(
            name="this",
            device_type="cpu",
            ranks_per_host=ranks,
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks,
            peak_flops={t: figure(f"flop/s {t}", partial(_flops_per_s, t)) for t in dtypes},
            memory_bytes_per_s=2 * copies if copies else figure("memory bytes/s", _bytes_per_s),
            memory_fraction=1.0,
            inside=Wire(0.0, link.bytes_per_s),
            between=Wire(between.latency_s, between.bytes_per_s),
            message_start_s=link.latency_s,
            launch_seconds=figure("launch s", _launch_s),
            host_seconds=figure("host s of a global op or view", host_s),
            efficiency=_FULL_EFFICIENCY,
            measurements=cache,
            background_load=background_load,
            host_speed=host_speed,
        )


def _cores() -> int:
    """Return how many ranks fit on this host if each needs as many cores as torch has threads."""
    return max(1, (os.cpu_count() or 1) // torch.get_num_threads())


def _seconds_on_meta(call: OpSignature) -> float | None:
    try:
        return replay.time_call(call, device="meta")
    except replay.CannotReplay:
        return None


def _usual_seconds(background_load: BackgroundLoad) -> float:
    """Return the usual seconds of the fixed calls of ``host_speed.py``, with all cores busy."""
    with replay.without_modes_and_grad(), background_load.while_making(None):
        return fixed_seconds(USUAL_S)


def _measure_speed(host_speed: HostSpeed, background_load: BackgroundLoad) -> None:
    """Measure the present speed of the host while all cores are busy, into ``host_speed``.

    ``background_load`` are the processes that keep the other cores busy.
    """
    with replay.without_modes_and_grad(), background_load.while_making(None):
        host_speed.measure()


# ---- figures ------------------------------------------------------------------------------------


def _flops_per_s(dtype: torch.dtype) -> float:
    n = 256 if dtype is torch.bfloat16 else 512
    x = torch.ones(n, n, dtype=dtype)
    return 2 * n**3 / typical_seconds(lambda: torch.mm(x, x))


def _bytes_per_s() -> float:
    x = torch.ones(1 << 23)  # 32 MiB, and 32 MiB for y: more than caches hold
    y = torch.empty_like(x)
    return 2 * x.nbytes / typical_seconds(lambda: y.copy_(x))


def _launch_s() -> float:
    x = torch.ones(1)
    add = torch.ops.aten.add_.Tensor
    return typical_seconds(lambda: add(x, x))


def _host_seconds() -> float:
    """Return the seconds of Python, autograd and dispatch that an op on global tensors adds.

    Forward and backward of a small model are timed, and the times of the ops themselves are
    subtracted. The model's tensors are large enough that they displace the library's code from the
    caches, as in a program that computes.
    """
    from ...dispatch.plans.shards import attach
    from ...spec import B, Placement, TensorSpec
    from .op_count import record_works

    rank = current().rank

    def on_this_rank(x: Any) -> Any:
        placement = Placement("cpu", [rank])
        return attach(x.detach(), TensorSpec.of(placement, (B,), x.shape, x.dtype))

    rows, width = 512, 256
    with torch.random.fork_rng(devices=[]):
        parts = [f() for _ in range(2) for f in (partial(nn.LayerNorm, width), nn.GELU)]
        model = nn.Sequential(*parts, nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width))
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = nn.Parameter(on_this_rank(p))
    x = on_this_rank(torch.ones(rows, width))

    def step() -> None:
        (model(x) * 2.0 + x).square().mean().backward()

    with torch.enable_grad():
        step()
        step_works = record_works(step)
        step_seconds = typical_seconds(step)
    timed = lru_cache(None)(replay.time_call)
    ops = sum(
        timed(work.key) for work in step_works if work.runs and isinstance(work.key, OpSignature)
    )
    return max(step_seconds - ops, 0.0) / len(step_works)
