"""What is to be shown on a GPU: one row a check, in the order in which they run (docs/gpu.md)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

SECONDS = "GPU_CHECK_SECONDS"  # what the driver tells a program of its limit


@dataclass(frozen=True)
class Check:
    """One program.

    Args:
        command: its words after the interpreter's name; "DEVICE" stands for "cpu" or "cuda".
        seconds: how long it may take.
        ranks: processes that it is started in by torchrun, 0 to start it plainly.
        spawns: whether it starts ranks by itself.
        on_cpu: whether it has something to say there.
        built: whether it needs the native modules.
        alone: whether it is timed, so that no other check may run at the same time.
    """

    name: str
    command: str
    seconds: int
    ranks: int = 0
    spawns: bool = False
    on_cpu: bool = True
    built: bool = True
    alone: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def words(self, device: str) -> list[str]:
        """The command line."""
        launched = f"-m torch.distributed.run --standalone --nproc_per_node {self.ranks}".split()
        words = self.command.replace("DEVICE", device).split()
        return [sys.executable, *(launched if self.ranks else []), *words]


_MESSAGES, _PEERS = ({"CONSISTENT_SHARED_MEMORY": switch} for switch in "01")


def _on_ranks(name: str, program: str, ranks: int, seconds: int) -> list[Check]:
    """Over messages (NCCL, gloo), and with ranks that read each other's memory."""
    command = f"-m tests.gpu.{program} --device DEVICE"
    return [
        Check(f"{name}_{ranks}_{how}", command, seconds, ranks, environment=environment)
        for how, environment in (("messages", _MESSAGES), ("peers", _PEERS))
    ]


def _on_gpu(
    name: str, command: str, seconds: int, spawns: bool = False, built: bool = True
) -> Check:
    return Check(name, command, seconds, spawns=spawns, on_cpu=False, built=built)


def _speed(name: str, command: str, seconds: int, spawns: bool = False) -> Check:
    return Check(name, f"benchmarks/{command}", seconds, spawns=spawns, alone=True)


CHECKS = [
    Check("machine", "-m tests.gpu.machine", 60, built=False, alone=True),
    replace(_on_gpu("build", "setup.py build_ext --inplace", 300, built=False), alone=True),
    Check("native_ops", "-m tests.gpu.native_ops --device DEVICE", 90),
    replace(_on_gpu("programs", "-m tests.gpu.programs", 180, built=False), alone=True),
    Check("random_bits", "-m tests.gpu.random_bits --device DEVICE", 90, ranks=2),
    *_on_ranks("boxing", "boxing_pairs", 2, 150),
    *_on_ranks("products", "split_products", 2, 120),
    *_on_ranks("ring", "ring", 2, 90),
    *_on_ranks("training", "training", 2, 120),
    *_on_ranks("codecs", "codecs", 2, 90),
    *_on_ranks("plans", "plans", 2, 120),
    *_on_ranks("plans", "plans", 4, 180),
    *_on_ranks("flexible", "flexible", 2, 240),
    Check("elastic", "-m tests.gpu.elastic --device DEVICE", 240, spawns=True, alone=True),
    Check("compiled_1", "-m tests.gpu.compiled_steps --device DEVICE", 300),
    *_on_ranks("compiled", "compiled_steps", 2, 300),
    _speed("kernels_bf16", "kernels.py --device DEVICE --compile --dtypes bfloat16", 240),
    _speed("random_speed", "random_speed.py --device DEVICE", 90),
    _speed("overhead", "overhead.py --device DEVICE --rounds 9", 150),
    *_on_ranks("boxing", "boxing_pairs", 4, 300),
    *_on_ranks("products", "split_products", 4, 180),
    *_on_ranks("schedules", "schedules", 4, 240),
    *_on_ranks("models", "models", 2, 300),
    *_on_ranks("operators", "operators", 2, 600),
    _on_gpu("memcheck", "-m tests.gpu.programs --under memcheck", 240, built=False),
    _on_gpu("racecheck", "-m tests.gpu.programs --under racecheck", 240, built=False),
    _speed("kernels_f32", "kernels.py --device DEVICE --compile --dtypes float32", 240),
    _on_gpu("marked_tests", "-m pytest -q -m gpu tests/mirrored", 120, spawns=True),
    _speed(
        "boxing_speed",
        "boxing.py --device DEVICE --ranks 2 --rounds 3 --sizes 65536 4194304 67108864",
        120,
        spawns=True,
    ),
    _speed("products_speed", "split_matmul.py --device DEVICE --rounds 3", 120, spawns=True),
]

# What fits into nine minutes: what matters most first, and no check may take
# the time of all that follow.
MINUTES_9 = 540
FIRST: dict[str, int] = {
    "machine": 30, "build": 120, "native_ops": 60, "operators_2_messages": 240, "programs": 120,
    "models_2_peers": 120, "boxing_2_peers": 60, "boxing_2_messages": 60, "training_2_peers": 60,
    "training_2_messages": 60, "random_bits": 60, "products_2_peers": 60, "compiled_2_peers": 180,
    "products_2_messages": 60, "compiled_1": 150,
}  # fmt: skip
SPEEDS: dict[str, int] = {
    "machine": 30, "build": 120, "kernels_bf16": 150, "random_speed": 60, "overhead": 90,
    "kernels_f32": 150, "compiled_1": 90, "boxing_speed": 60, "products_speed": 60,
}  # fmt: skip
LISTS = {"first": FIRST, "speeds": SPEEDS}


def listed(name: str) -> list[Check]:
    """The checks of a list, in its order and with its limits."""
    known = {check.name: check for check in CHECKS}
    return [replace(known[each], seconds=seconds) for each, seconds in LISTS[name].items()]
