"""What is to be shown on a GPU: one row a check, in the order in which they run (docs/gpu.md)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Check:
    """One program.

    Args:
        command: its words after the interpreter's name; "DEVICE" stands for "cpu" or "cuda".
        seconds: how long it may take.
        ranks: processes that it is started in by torchrun, 0 to start it plainly.
        spawns: whether it starts ranks by itself.
        on_cpu: whether it has something to say there.
    """

    name: str
    command: str
    seconds: int
    ranks: int = 0
    spawns: bool = False
    on_cpu: bool = True
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


def _on_gpu(name: str, command: str, seconds: int, spawns: bool = False) -> Check:
    return Check(name, command, seconds, spawns=spawns, on_cpu=False)


CHECKS = [
    _on_gpu("build", "setup.py build_ext --inplace", 300),
    Check("native_ops", "-m tests.gpu.native_ops --device DEVICE", 90),
    _on_gpu("programs", "-m tests.gpu.programs", 180),
    Check("random_bits", "-m tests.gpu.random_bits --device DEVICE", 90, ranks=2),
    *_on_ranks("boxing", "boxing_pairs", 2, 150),
    *_on_ranks("products", "split_products", 2, 120),
    *_on_ranks("training", "training", 2, 120),
    Check("compiled_1", "-m tests.gpu.compiled_steps --device DEVICE", 300),
    *_on_ranks("compiled", "compiled_steps", 2, 300),
    _on_gpu("kernels_bf16", "benchmarks/kernels.py --device cuda --compile --dtypes bfloat16", 240),
    _on_gpu("random_speed", "benchmarks/random_speed.py --device cuda", 90),
    _on_gpu("overhead", "benchmarks/overhead.py --device cuda --rounds 9", 150),
    *_on_ranks("boxing", "boxing_pairs", 4, 300),
    *_on_ranks("products", "split_products", 4, 180),
    *_on_ranks("schedules", "schedules", 4, 240),
    _on_gpu("memcheck", "-m tests.gpu.programs --under memcheck", 240),
    _on_gpu("racecheck", "-m tests.gpu.programs --under racecheck", 240),
    _on_gpu("kernels_f32", "benchmarks/kernels.py --device cuda --compile --dtypes float32", 240),
    _on_gpu("marked_tests", "-m pytest -q -m gpu tests/mirrored", 120, spawns=True),
    _on_gpu(
        "boxing_speed",
        "benchmarks/boxing.py --device cuda --ranks 2 --rounds 3 --sizes 65536 4194304 67108864",
        120,
        spawns=True,
    ),
    _on_gpu(
        "products_speed", "benchmarks/split_matmul.py --device cuda --rounds 3", 120, spawns=True
    ),
]
