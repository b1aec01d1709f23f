"""``Machine``: a cost model with a name, which a person can check, save and load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mirrored.comm import Link

from ...cost_model.model import CostModel
from ...nn.plan import yaml_text
from . import files
from .checked import check_machine


@dataclass(frozen=True)
class Machine(CostModel):
    """Identical hosts, each with some devices, and what ops and messages cost on them.

    A matmul takes the longer of two times: its flops at (peak x efficiency), and its bytes at the
    memory rate. Any other op takes its bytes at the memory rate. Both start after
    ``launch_seconds``. The Python process takes ``host_seconds`` for each op on average, more in
    forward and less elsewhere (``OP_SHARES``). If ``host_overlaps``, the process
    runs ahead of the device: a step takes as long as the slower of the two, and an op starts when
    it has been issued and the device is free. On a CPU both are the same processor, so their times
    add up.

    Args:
        name: name of the machine in reports.
        device_type: "cpu" or "cuda".
        ranks_per_host: number of consecutive ranks of the world on one host, with one device each.
        memory_bytes: memory of a device, in bytes.
        peak_flops: dtype -> flop/s of matmuls at the clock of the data sheet, without sparsity. A
            dtype that is not listed has the lowest of these rates.
        memory_bytes_per_s: bytes per second that a device reads + writes, by its data sheet.
        memory_fraction: the fraction of ``memory_bytes_per_s`` that ops reach.
        inside: links between ranks of one host.
        between: links between ranks of different hosts.
        message_start_s: seconds that any message takes in addition to its hops.
        launch_seconds: seconds that any op takes on the device, however small.
        host_seconds: seconds of Python, autograd and dispatch for each op, on average over forward
            and backward.
        efficiency: (seconds at the peak rate, fraction of the peak rate reached) of matmuls, by
            rising seconds; logarithms are interpolated between two points, so that a larger matmul
            is never estimated to be faster.
        overlap: of an op's compute time and memory time, the share of the shorter that passes
            during the longer, 0 to 1.

    Raises:
        ValueError: a figure is missing, negative or NaN; the message names the figure.
    """

    def __post_init__(self) -> None:
        check_machine(self)

    def of(self, ranks: int) -> Machine:
        """Return the machine for a world of ``ranks`` ranks: itself, except in subclasses."""
        return self

    def link(self, ranks: int) -> Link:
        """Return the bandwidth and latency that ``ranks`` ranks on this machine would measure.

        A simulated program chooses the sizes of its messages by them.
        """
        return Link(self.latency, self.bandwidth)

    def save(self, path: str | Path) -> None:
        """Write the machine as YAML that a person can read and edit."""
        yaml_text.write(path, files.to_text(self))

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a machine from its YAML file.

        Raises:
            ValueError: the file is not YAML, or a figure is missing, unknown, negative or no
                number.
        """
        return cls(**files.from_text(yaml_text.read(path), str(path)))
