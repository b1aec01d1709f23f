"""Settings of ``nn.Graph`` that change how a step runs without changing its ``build``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch

from ..compiled import CompileOptions, Options, shows_options
from ..pipeline.schedules import schedule_kind


class _Option:
    """Descriptor that makes a field of ``CompileOptions`` an attribute of ``GraphConfig``.

    ``config.fuse`` reads ``config.options.fuse``. Setting it replaces ``config.options``, which is
    immutable, by a copy with the new value.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, config: GraphConfig, owner: Any = None) -> Any:
        return self if config is None else getattr(config.options, self._name)

    def __set__(self, config: GraphConfig, value: Any) -> None:
        config.options = replace(config.options, **{self._name: value})


@dataclass
class GraphConfig:
    """Settings of a graph (``graph.config``), set as attributes or by the methods.

    Args:
        amp: dtype of autocast, under which ``build`` runs; None for no autocast.
        micro_batches: number of parts into which the batch is cut along dim 0; their gradients are
            added up. The loss counts as a mean over rows: the loss of a part is weighted by its
            share of rows.
        zero: ZeRO stage, which shards state over the ranks on which a parameter is replicated: 1
            optimizer state, 2 gradients too, 3 also the parameters, which are then gathered for
            use. 0 shards nothing.
        schedule: the order in which stages run micro-batches; see ``consistent.nn.pipeline``.
        is_compiled: whether to run the whole step as one recorded program; see
            ``consistent.compile``.
        options: compile options of the recorded program.

    ``backend`` reads the backend of ``options``, or None if ``is_compiled`` is false; ``layouts``,
    ``memory``, ``overlap``, ``fuse`` and ``cuda_graph`` read and set the attributes of ``options``
    with these names.
    """

    amp: torch.dtype | None = None
    micro_batches: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    is_compiled: bool = False
    options: CompileOptions = CompileOptions()
    _settled: dict[str, Any] = field(default_factory=dict, repr=False)

    layouts = _Option()
    memory = _Option()
    overlap = _Option()
    fuse = _Option()
    cuda_graph = _Option()

    @property
    def backend(self) -> str | None:
        """Name of the backend that runs the recorded program; None if the step runs as written."""
        return self.options.backend if self.is_compiled else None

    @backend.setter
    def backend(self, value: str | None) -> None:
        self.is_compiled = value is not None
        if value is not None:
            self.options = replace(self.options, backend=value)

    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Run ``build`` under autocast to ``dtype``; with ``mode=False`` without autocast."""
        self.amp = dtype if mode else None

    def set_gradient_accumulation_steps(self, value: int) -> None:
        """Cut each batch into ``value`` micro-batches, and add up their gradients for the step.

        Raises:
            ValueError: ``value`` is not a whole number above 0.
        """
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"set_gradient_accumulation_steps: value is {value!r}. Give a whole number of "
                "micro-batches, 1 or more."
            )
        self.micro_batches = value

    def enable_zero(self, mode: bool = True, *, stage: int = 2) -> None:
        """Shard optimizer state over the ranks on which a parameter is replicated (ZeRO).

        With ``stage`` 2 gradients are sharded too. With 3 the parameters of modules that were
        passed to ``parallelize`` are also sharded, as in its plan ``"zero3"``. ``mode=False``
        switches ZeRO off for modules that no step has sharded yet.

        Raises:
            ValueError: ``stage`` is none of 1, 2 and 3.
        """
        if stage not in (1, 2, 3):
            raise ValueError(
                f"enable_zero: stage is {stage!r}. Give 1 (optimizer state), 2 (gradients too) or "
                "3 (parameters too)."
            )
        self.zero = stage if mode else 0

    @shows_options
    def enable_compile(self, mode: bool = True, **options: Unpack[Options]) -> None:
        """Record the second call of the graph, and run the recording as a program in later calls.

        Args:
            mode: False to run each call as ``build`` is written.
            options: those of ``consistent.compile``.

        Raises:
            ValueError, ImportError: an option is not available; ``CompileOptions`` describes when.
        """
        self.options = CompileOptions(**options, what="enable_compile")
        self.is_compiled = mode

    def set_schedule(self, name: str) -> None:
        """Set the order in which pipeline stages run micro-batches to the schedule ``name``.

        Raises:
            ValueError: there is no schedule of that name.
        """
        schedule_kind(name)
        self.schedule = name
