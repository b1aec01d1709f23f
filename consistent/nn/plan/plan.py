"""Plan of a module as data that can be printed, and saved and loaded as YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from mirrored.readable import on_one_line

from ...spec import Placement
from . import files, table, yaml_text
from .layouts import Border, Layouts, join_axes, join_borders
from .names import match, match_path

# Enough for a model whose step takes some milliseconds, and little compared to a process's memory.
KEEP_BYTES = 4 << 20


class Plan:
    """Layouts of a module's parameters and buffers, and boxing of modules' arguments and results.

    A layout (SBP) has one entry for each placement axis: S (sharded), B (replicated) or P (partial
    sum). Boxing is redistribution to another layout.

    ```
    plan = Plan({"*.fc1.weight": S(0), "*.fc2.weight": S(1)})
    plan = consistent.plan_of(model)       # of a parallelized module: every tensor by its name
    print(plan)
    plan.save("plan.yaml"); plan = Plan.load("plan.yaml")
    ```

    Args:
        tensors: name, or pattern as in ``fnmatch``, of parameters and buffers -> an SBP, or
            ``Layouts``, or a mapping with ``sbp`` and those of ``use``, ``grad`` and ``step`` that
            differ from it. An exact name precedes patterns, and of these the first match counts.
            Tensors without a match are B.
        modules: name or pattern of modules -> a ``Border``, or a mapping with ``inputs`` and
            ``outputs``, each ``{position or keyword: SBP}``. Here ``*`` stops at a dot.
        axes: names of the placement's axes, in order.
        notes: sentences on modules and tensors that the plan leaves as they are, and why.
        tied: further name of a tensor -> the name that it has in ``tensors``.
        shapes: logical shapes of the tensors, for printing.
        keep_bytes: a limit on gathered parameters, those whose ``use`` differs from ``sbp``. If all
            of them take at most this many bytes on a rank, they are gathered together when the
            module is called, and kept until its backward has ended. Otherwise, or with 0, each
            submodule gathers its own parameters when it is called, and again in backward.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | None = None,
        modules: Mapping[str, Any] | None = None,
        *,
        axes: Sequence[str] = (),
        notes: Sequence[str] = (),
        tied: Mapping[str, str] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        self.tensors: dict[str, Layouts] = {}
        for name, entry in (tensors or {}).items():
            self.tensors[name] = Layouts.like(entry)
        self.modules = {name: Border.like(entry) for name, entry in (modules or {}).items()}
        self.axes, self.notes = tuple(axes), list(notes)
        self.tied, self.shapes = dict(tied or {}), dict(shapes or {})
        self.keep_bytes = keep_bytes

    def layouts(self, name: str) -> Layouts | None:
        """Return the layouts of a tensor by any of its names; None if the plan has none for it."""
        pattern = match(self.tied.get(name, name), self.tensors)
        return None if pattern is None else self.tensors[pattern]

    def border(self, name: str) -> Border | None:
        """Return the layouts to which a module's arguments and results are redistributed.

        None if no name or pattern in ``modules`` matches.
        """
        pattern = match_path(name, self.modules)
        return None if pattern is None else self.modules[pattern]

    def on(self, placement: Placement) -> Plan:
        """Return the plan for ``placement``, without redistribution along axes that have one rank.

        Tensors become B (replicated) along such an axis, where S, B and P are the same, and borders
        box nothing. Without such an axis, or if the plan redistributes nothing, it is returned
        itself.
        """
        if all(n > 1 for n in placement.shape):
            return self
        if not self.modules and all(each.is_one for each in self.tensors.values()):
            return self
        tensors = {name: layouts.on(placement) for name, layouts in self.tensors.items()}
        borders = {name: border.on(placement) for name, border in self.modules.items()}
        modules = {name: border for name, border in borders.items() if border.boxes}
        return Plan(
            tensors,
            modules,
            axes=self.axes,
            notes=self.notes,
            tied=self.tied,
            shapes=self.shapes,
            keep_bytes=self.keep_bytes,
        )

    def keeping(self, keep_bytes: int | None) -> Plan:
        """Return a copy of the plan, with another ``keep_bytes`` unless it is None."""
        plan = copy(self)
        if keep_bytes is not None:
            plan.keep_bytes = keep_bytes
        return plan

    def part(self, tensors: Sequence[str], modules: Sequence[str]) -> Plan:
        """Return the plan of a part of the model, with only these names of tensors and modules.

        The stages of a pipeline use it: each takes its entries from a plan of the whole model.
        """
        tensor_layouts = {name: x for name in tensors if (x := self.layouts(name)) is not None}
        borders = {name: x for name in modules if (x := self.border(name)) is not None}
        return Plan(
            tensor_layouts, borders, axes=self.axes, notes=self.notes, keep_bytes=self.keep_bytes
        )

    @classmethod
    def join(cls, plans: Sequence[Plan], axes: Sequence[str] = ()) -> Plan:
        """Join plans for one placement axis each, in axis order, into one plan for all axes.

        The plans of ``"data"`` and ``"zero3"`` become one in which weights are ``(B, S(0))``. They
        must name tensors and modules without wildcards.
        """
        names = dict.fromkeys(name for plan in plans for name in plan.tensors)
        borders = dict.fromkeys(name for plan in plans for name in plan.modules)
        return cls(
            {name: join_axes([p.tensors.get(name) for p in plans]) for name in names},
            {name: join_borders([p.modules.get(name) for p in plans]) for name in borders},
            axes=axes,
            notes=[note for plan in plans for note in plan.notes],
            keep_bytes=min((plan.keep_bytes for plan in plans), default=KEEP_BYTES),
        )

    def save(self, path: str | Path) -> Path:
        """Write the plan to a YAML file, which may be edited and loaded again."""
        return yaml_text.write(path, self.yaml())

    def yaml(self) -> str:
        """Return the YAML text that ``save`` writes."""
        keeps = None if self.keep_bytes == KEEP_BYTES else self.keep_bytes
        return files.to_text(
            self.axes, self.tensors, self.modules, self.notes, tied=self.tied, keep_bytes=keeps
        )

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file that ``save`` wrote.

        Raises:
            ValueError: the file is not a plan.
        """
        return cls(**files.from_text(yaml_text.read(path), str(path)))

    def __str__(self) -> str:
        lines = [f"axes: {', '.join(self.axes)}"] if self.axes else []
        lines += table.tensor_lines(self.tensors, self.shapes, self.tied)
        if self.modules:
            lines += ["", *table.border_lines(self.modules)]
        if self.keep_bytes != KEEP_BYTES:
            lines += ["", f"keep_bytes: {self.keep_bytes}"]
        lines += [f"note: {on_one_line(note)}" for note in self.notes]
        return "\n".join(lines)

    def __repr__(self) -> str:
        boxed = f", {len(self.modules)} borders" if self.modules else ""
        return f"Plan({len(self.tensors)} tensors{boxed})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        contents = self.tensors, self.modules, self.keep_bytes
        return contents == (other.tensors, other.modules, other.keep_bytes)

    __hash__ = None  # type: ignore[assignment]
