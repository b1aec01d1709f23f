"""What ``nn.Graph`` is asked to do beside its ``build``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..compiled import (
    check_backend,
    check_cuda_graph,
    check_fuse,
    check_layouts,
    check_memory,
    check_overlap,
)
from ..pipeline.schedules import check_name


@dataclass
class GraphConfig:
    """``graph.config``. Attributes may be set, and the documents' methods set them.

    Args:
        amp: run ``build`` under autocast to this dtype; None: as it is written.
        micro_batches: cut the batch into so many parts along dim 0, and add up their gradients. The
            loss counts as a mean over rows: that of a part weighs as much as its share of rows.
        zero: 1, 2 or 3: optimizers keep their state, with 2 gradients too, split over the ranks
            that hold a parameter alike; with 3 parameters lie split as well, and are gathered for
            use.
        schedule: the order in which stages run micro-batches; see ``consistent.nn.pipeline``.
        backend: run the whole step as one recorded program, by "inductor" or by "ops"; see
            ``consistent.compile``. None: as it is written.
        layouts: of the recorded program, as for ``consistent.compile``.
        memory: bytes, as for ``consistent.compile``.
        overlap: as for ``consistent.compile``.
        fuse: as for ``consistent.compile``.
        cuda_graph: as for ``consistent.compile``.
    """

    amp: torch.dtype | None = None
    micro_batches: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    backend: str | None = None
    layouts: str | None = None
    memory: int | None = None
    overlap: bool | str = False
    fuse: bool | str = "auto"
    cuda_graph: bool = False
    _settled: dict[str, Any] = field(default_factory=dict, repr=False)

    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Run ``build`` under autocast to ``dtype``."""
        self.amp = dtype if mode else None

    def set_gradient_accumulation_steps(self, value: int) -> None:
        """Cut each batch into ``value`` micro-batches.

        Raises:
            ValueError: it is not a whole number above 0.
        """
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"set_gradient_accumulation_steps: value is {value!r}. Give a whole number of "
                "micro-batches, 1 or more."
            )
        self.micro_batches = value

    def enable_zero(self, mode: bool = True, *, stage: int = 2) -> None:
        """Split what optimizers keep over the ranks that hold a parameter alike; with ``stage`` 2
        gradients too, with 3 also the parameters of modules that were given to ``parallelize``,
        which is its plan ``"zero3"``.

        Raises:
            ValueError: ``stage`` is none of 1, 2 and 3.
        """
        if stage not in (1, 2, 3):
            raise ValueError(
                f"enable_zero: stage is {stage!r}. Give 1 (optimizer state), 2 (gradients too) or "
                "3 (parameters too)."
            )
        self.zero = stage if mode else 0

    def enable_compile(
        self,
        mode: bool = True,
        *,
        backend: str = "inductor",
        layouts: str | None = None,
        memory: int | None = None,
        overlap: bool | str = False,
        fuse: bool | str = "auto",
        cuda_graph: bool = False,
    ) -> None:
        """Record the second step and run it as a program from then on. ``layouts``,
        ``memory``, ``overlap``, ``fuse`` and ``cuda_graph`` are as for ``consistent.compile``.

        Raises:
            ValueError: the backend is not known, ``layouts`` is neither "auto" nor None,
                ``memory`` is no number of bytes, or ``overlap`` or ``fuse`` is none of True, False
                and "auto"; or ``cuda_graph`` is asked for where torch has no CUDA device.
            ImportError: ``layouts`` is "auto", and scipy is not installed.
        """
        check_backend("enable_compile", backend)
        check_layouts("enable_compile", layouts)
        check_memory("enable_compile", memory)
        check_overlap("enable_compile", overlap)
        check_fuse("enable_compile", fuse)
        check_cuda_graph("enable_compile", cuda_graph)
        self.backend = backend if mode else None
        self.layouts, self.memory, self.overlap = layouts, memory, overlap
        self.fuse, self.cuda_graph = fuse, cuda_graph

    def set_schedule(self, name: str) -> None:
        """Run stages in the order of this schedule.

        Raises:
            ValueError: no schedule is called so.
        """
        check_name(name)
        self.schedule = name
