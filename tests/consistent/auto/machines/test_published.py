"""Figures of an A100 host against the measurements of table 1 of arXiv 2104.04473, on paper.

A GPT in fp16 under tensor and pipeline parallelism, with recomputed activations, as in that paper:
products, bytes of fused kernels at the memory rate, two all-reduces a layer each way, sends between
stages, the bubble of 1F1B, the all-reduce of gradients, the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from consistent.auto.machines import Work, machine

SEQUENCE, VOCABULARY = 2048, 51200
# layers, hidden, heads, tensor, stages, GPUs, batch, and TFLOP/s a GPU as published
ROWS = (
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (30, 3072, 32, 2, 1, 64, 512, 138),
    (36, 4096, 32, 4, 1, 128, 512, 142),
    (40, 6144, 48, 8, 1, 256, 1024, 135),
    (48, 8192, 64, 8, 2, 512, 1536, 138),
    (60, 10240, 80, 8, 4, 1024, 1792, 140),
    (80, 12288, 96, 8, 8, 1536, 2304, 148),
    (96, 16384, 128, 8, 16, 1920, 2160, 155),
    (105, 20480, 128, 8, 35, 2520, 2520, 163),
    (128, 25600, 160, 8, 64, 3072, 3072, 163),
)
A100 = machine("a100-8")


def product(batch: int, m: int, k: int, n: int) -> float:
    flops, nbytes = 2.0 * batch * m * k * n, 2 * batch * (m * k + k * n + m * n)
    return A100.op_seconds(Work("mm", "matmul", torch.float16, flops, nbytes, None))


def touch(nbytes: float) -> float:
    return A100.op_seconds(Work("add", "pointwise", torch.float16, 0.0, int(nbytes), None))


def all_reduce(nbytes: float, ranks: tuple[int, ...]) -> float:
    sent = 2 * (len(ranks) - 1) * nbytes / len(ranks)
    return A100.message_seconds("all_reduce", int(sent), ranks)


@dataclass(frozen=True)
class Gpt:
    layers: int
    hidden: int
    heads: int
    tensor: int
    stages: int
    gpus: int
    batch: int

    @property
    def data(self) -> int:
        return self.gpus // (self.tensor * self.stages)

    @property
    def flops(self) -> float:
        """Those of the paper's equation 3, which counts the recomputed forward."""
        b, s, n, h, v = self.batch, SEQUENCE, self.layers, self.hidden, VOCABULARY
        return 96 * b * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))

    def layer_seconds(self, micro: int) -> float:
        """Forward, forward again, and backward of one layer on a micro-batch."""
        s, h, t, rows = SEQUENCE, self.hidden, self.tensor, micro * SEQUENCE
        pairs, width = micro * self.heads // t, h // self.heads
        products = (
            (1, rows, h, 3 * h // t), (pairs, s, width, s), (pairs, s, s, width),
            (1, rows, h // t, h), (1, rows, h, 4 * h // t), (1, rows, 4 * h // t, h),
        )  # fmt: skip
        x, scores = 2 * rows * h, 2 * pairs * s * s
        # Bytes of: two layer norms, transposes of q, k, v and of the context, softmax, its dropout,
        # bias + gelu, and twice bias + dropout + add.
        fused = (2 * x, 2 * x, 6 * x / t, 2 * x / t, 2 * scores, 2.5 * scores, 8 * x / t, 3.5 * x, 3.5 * x)  # noqa: E501  # fmt: skip
        forward = sum(product(*p) for p in products) + sum(map(touch, fused))
        back = sum(product(b, m, n, k) + product(b, k, m, n) for b, m, k, n in products)
        back += sum(touch(1.3 * f) for f in fused)  # gradients are read as well
        return 2 * forward + back + 6 * all_reduce(x, tuple(range(t)))

    def step_seconds(self, micro: int) -> float:
        rows, t = micro * SEQUENCE, self.tensor
        count = self.batch // (self.data * micro)
        each = self.layers // self.stages * self.layer_seconds(micro)
        each += 3 * product(1, rows, self.hidden, VOCABULARY // t)
        each += 4 * touch(4 * rows * VOCABULARY / t)
        if self.stages > 1:  # each rank sends its part of an activation, and of its gradient
            each += 2 * A100.message_seconds("send", 2 * rows * self.hidden // t, (0, 8))
        weights = (12 * self.layers * self.hidden**2 / self.stages + VOCABULARY * self.hidden) / t
        replicas = tuple(range(0, self.data * t, t))
        return (
            each * (count + self.stages - 1)
            + all_reduce(2 * weights, replicas)
            + touch(32 * weights)
        )

    def tflops(self) -> float:
        """TFLOP/s of a GPU with the best micro-batch."""
        sizes = [m for m in (1, 2, 4, 8, 16) if self.batch % (self.data * m) == 0]
        return self.flops / min(map(self.step_seconds, sizes)) / self.gpus / 1e12


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} layers of {row[1]}")
def test_each_row_is_within_15_percent(row: tuple[int, ...]) -> None:
    assert Gpt(*row[:-1]).tflops() == pytest.approx(row[-1], rel=0.15)


def test_rows_are_within_8_percent_on_average() -> None:
    errors = [abs(Gpt(*row[:-1]).tflops() / row[-1] - 1) for row in ROWS]
    assert sum(errors) / len(errors) < 0.08
