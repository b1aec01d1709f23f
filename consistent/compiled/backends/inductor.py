"""Backend that compiles kernels with torch's Inductor."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from mirrored.readable import escape_invisible, is_utf8

from .form import Form, Number, form_of
from .graph_cache import compile_graph
from .in_order import keep_in_order
from .own_folder import use_own_folder
from .realize_scalars import realize_scalars
from .unalias_outputs import CompiledCallable, unalias_outputs

_log = logging.getLogger(__name__)
_MAX_FORMS = 16  # forms whose code is kept for further sizes
MAX_CODES = 4  # compiled graphs with symbolic sizes, per form
_MAX_NUMBER_SETS = 16  # sets of numbers that are compared, per form
MAX_COMPILED = 256  # graphs per step: torch keeps compiled code until the process ends


class Inductor:
    """Backend that compiles with Inductor.

    Torch's random ops are not replaced, so that they draw the numbers of an eager step. Torch
    caches compiled code on disk, in a folder that belongs to this user.

    Graphs that differ only in numbers, such as sizes, have one form (``form.py``). The first graph
    of a form is specialized to its numbers, which gives the fastest code. The next graph of the
    form that no existing code can run is compiled with symbols for all numbers that differ, as far
    as torch allows.
    """

    def __init__(self) -> None:
        self._codes_by_form: OrderedDict[object, _FormCodes] = OrderedDict()
        self._budget = _Budget()

    def __call__(self, graph: GraphModule, inputs: Sequence[torch.Tensor]) -> CompiledCallable:
        if any(x.is_meta for x in inputs) or _has_non_utf8_path():
            return graph.forward
        import torch._inductor.config as config

        use_own_folder()
        keep_in_order()
        graph = realize_scalars(graph, inputs)
        with config.patch(fallback_random=True):
            form = form_of(graph, inputs)
            if form is None:
                return self._budget.compile_specialized(graph, inputs, None)
            # Forms are ordered by last use; the oldest is dropped.
            codes = self._codes_by_form.setdefault(form.text, _FormCodes(self._budget))
            self._codes_by_form.move_to_end(form.text)
            if len(self._codes_by_form) > _MAX_FORMS:
                self._codes_by_form.popitem(last=False)
            return codes.code(graph, inputs, form)


class _Budget:
    """Limit on the number of graphs that one step compiles; beyond it, graphs run op by op."""

    def __init__(self) -> None:
        self._remaining = MAX_COMPILED

    def take(self) -> bool:
        """Take one graph from the budget, and return whether it may be compiled."""
        self._remaining -= 1
        # Only the first graph beyond the limit warns.
        if self._remaining == -1:
            warnings.warn(
                f"consistent.compile: {MAX_COMPILED} graphs of this step were compiled, nearly as "
                "many as it has sizes or branches. The ops of further ones run one by one. Round "
                "sizes up, so that fewer differ, or leave the step as it is written.",
                stacklevel=2,
            )
        return self._remaining >= 0

    def compile_specialized(
        self, graph: GraphModule, inputs: Sequence[torch.Tensor], form: Form | None
    ) -> CompiledCallable:
        """Return code that is specialized to the numbers of ``graph`` and the sizes of ``inputs``.

        Without a ``form``, the code is not cached on disk. If the budget is used up, the returned
        function runs the graph op by op.
        """
        if not self.take():
            return graph.forward
        return unalias_outputs(graph, compile_graph(graph, inputs, form))


class _FormCodes:
    """Compiled code of all graphs that have one form, that is, that differ only in numbers.

    ``budget`` limits how many graphs may still be compiled.
    """

    def __init__(self, budget: _Budget) -> None:
        self._budget = budget
        self._known_numbers: OrderedDict[tuple[Number, ...], None] = OrderedDict()
        self._codes: list[Any] = []  # of symbolic.Symbolic
        self._may_share = True

    def code(
        self, graph: GraphModule, inputs: Sequence[torch.Tensor], form: Form
    ) -> CompiledCallable:
        """Return code that can run ``graph``: existing code, or newly compiled code."""
        shared_code = next((code for code in self._codes if code.serves(form.numbers)), None)
        if shared_code is None and self._known_numbers and form.numbers not in self._known_numbers:
            shared_code = self._compile_symbolic(graph, inputs, form)
        self._known_numbers[form.numbers] = None
        if len(self._known_numbers) > _MAX_NUMBER_SETS:
            self._known_numbers.popitem(last=False)
        return (
            self._budget.compile_specialized(graph, inputs, form)
            if shared_code is None
            else shared_code.bind_form(form)
        )

    def _compile_symbolic(
        self, graph: GraphModule, inputs: Sequence[torch.Tensor], form: Form
    ) -> Any | None:
        from .symbolic import (
            NotSymbolic,
            Symbolic,
        )  # imported late: it imports torch._dynamo, which takes a second

        if not self._may_share or len(self._codes) >= MAX_CODES or not self._budget.take():
            return None
        try:
            code = Symbolic(graph, inputs, form, list(self._known_numbers))
        except NotSymbolic:
            return None
        except Exception:
            # Torch cannot compile every op with symbols. Compiling with numbers may still work, and
            # computes the same.
            _log.info("torch has no code for several sizes of these ops", exc_info=True)
            self._may_share = False
            return None
        self._codes.append(code)
        return code if code.serves(form.numbers) else None


def _has_non_utf8_path() -> bool:
    """Return whether torch's compiler would fail, and warn if so.

    It decodes the paths of all files on the call stack as UTF-8, and fails if one is not UTF-8.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_utf8(name):
            warnings.warn(
                f"consistent.compile: the path {escape_invisible(name)} is not UTF-8, and torch's "
                "compiler reads no other. The ops of this step run one by one; rename the folder "
                "or file to have them compiled.",
                stacklevel=2,
            )
            return True
        frame = frame.f_back
    return False
