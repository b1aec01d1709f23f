"""Conversion of a solution of the layout problem to a ``Plan``, which a run can follow.

A plan contains layouts of parameters, and borders: the boxing of values where modules are called. A
value is boxed at the end of the module that makes it, if all later readers want one layout.
Otherwise it is boxed at the call of a module in which all readers want one layout. In all other
cases each op boxes its operands when it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ....graph.global_ops import BUFFER, OP, PARAMETER, Op
from ....layout_problem.problem import Problem, may_gather
from ....spec import B, NdSbp
from ...plan import Border, Layouts, Nd, Plan
from .program import Enter, Exit, RecordedStep


def plan_of_solution(program: RecordedStep, problem: Problem, solution: Sequence[int]) -> Plan:
    """Return the plan under which a run comes closest to ``solution``.

    A run chooses the layouts of ops itself, so a plan cannot fix all that a solution has.

    Args:
        program: the recorded step.
        problem: the layout problem of that step.
        solution: for each node of the problem, the index of the chosen option.
    """
    writer = _PlanWriter(program, problem, solution)
    writer.add_tensors()
    writer.add_borders()
    return writer.plan


class _PlanWriter:
    """Conversion of one solution of the layout problem to ``plan``.

    ``add_tensors`` and ``add_borders`` add what the plan contains.
    """

    def __init__(self, program: RecordedStep, problem: Problem, solution: Sequence[int]) -> None:
        self.program = program
        self.plan = Plan(axes=program.placement.axes or ())
        self.made_layouts: dict[int, NdSbp] = {}  # value -> layout as it is made
        # value -> (when it is read, in which layout); the results are read at the end.
        self.reads: dict[int, list[tuple[int, NdSbp]]] = {}
        times = self._run_positions()
        for node, index, at in zip(problem.nodes, solution, times, strict=True):
            option = node.options[index]
            self.made_layouts.update(zip(node.outs, option.outs, strict=True))
            for v, layout in zip(node.ins, option.ins, strict=True):
                self.reads.setdefault(v, []).append((at, layout))
        self.ends = self._call_ends()

    def _run_positions(self) -> Iterable[int]:
        """Return when each node runs: the position of its op among ``program.events``.

        Inputs, parameters and buffers have position -1, and results come after all events.
        """
        program = self.program
        inputs = [-1 for value in program.values if value.kind != OP]
        ops = [at for at, event in enumerate(program.events) if isinstance(event, Op)]
        results = dict.fromkeys([*program.losses, *program.results])
        return [*inputs, *ops, *(len(program.events) for _ in results)]

    def _call_ends(self) -> dict[int, int]:
        """Return where each module call ends: position of the ``Enter`` -> that of the ``Exit``."""
        ends, open_calls = {}, []
        for at, event in enumerate(self.program.events):
            if isinstance(event, Enter):
                open_calls.append(at)
            elif isinstance(event, Exit):
                ends[open_calls.pop()] = at
        return ends

    def add_tensors(self) -> None:
        """Add the layouts of parameters and buffers to the plan."""
        for index, value in enumerate(self.program.values):
            if value.kind not in (PARAMETER, BUFFER):
                continue
            sbp = self.made_layouts[index]
            layouts = {layout for _, layout in self.reads.get(index, ())}
            use = next(iter(layouts)) if len(layouts) == 1 else sbp
            self.plan.tensors[value.name] = Layouts(sbp, use if may_gather(sbp, use) else sbp)

    def add_borders(self) -> None:
        """Add the boxing at module calls to the plan.

        A value is boxed (redistributed) where all its readers inside, or after, want one layout.
        """
        replicated: NdSbp = (B,) * self.program.placement.ndim
        layout_of = {
            v: sbp
            if self.program.values[v].kind == OP
            else self.program.values[v].fixed or replicated
            for v, sbp in self.made_layouts.items()
        }
        outer_layouts: list[dict[int, NdSbp]] = []
        for at, event in enumerate(self.program.events):
            if isinstance(event, Enter):
                outer_layouts.append({})
                for key, v in event.arguments.items():
                    if (target := self._common_layout(v, at, self.ends[at])) not in (
                        None,
                        layout_of[v],
                    ):
                        outer_layouts[-1].setdefault(v, layout_of[v])
                        layout_of[v] = self._add_boxing(event.module, "inputs", key, target)  # type: ignore[arg-type]
            elif isinstance(event, Exit):
                # A boxed input is boxed inside the call only; outside it keeps its layout.
                layout_of.update(outer_layouts.pop())
                for key, v in event.results.items():
                    if (target := self._common_layout(v, at, len(self.program.events) + 1)) not in (
                        None,
                        layout_of[v],
                    ):
                        layout_of[v] = self._add_boxing(event.module, "outputs", key, target)  # type: ignore[arg-type]

    def _common_layout(self, v: int, begin: int, end: int) -> NdSbp | None:
        """Return the layout that all readers of the value ``v`` between two events want.

        None if there is no such layout, it has a partial sum, or ``v`` is modified in place later:
        the op would modify a redistributed copy.

        Args:
            v: the number of the value.
            begin, end: the positions of the events.
        """
        if self.program.memory.is_written_after(v, begin):
            return None
        layouts = {layout for at, layout in self.reads.get(v, ()) if begin < at < end}
        if len(layouts) != 1:
            return None
        (layout,) = layouts
        return None if any(e.is_partial for e in layout) else layout

    def _add_boxing(self, module: str, side: str, key: int | str, target: NdSbp) -> NdSbp:
        """Add the layout ``target`` of an argument or result to the plan.

        An entry that is there already stays. Returns the entry.
        """
        border = self.plan.modules.get(module, Border())
        layouts: Mapping[int | str, Nd] = {key: target, **getattr(border, side)}
        sides = {"inputs": border.inputs, "outputs": border.outputs, side: layouts}
        self.plan.modules[module] = Border(**sides)
        return layouts[key]  # type: ignore[return-value]
