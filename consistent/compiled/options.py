"""Options of ``consistent.compile``.

A new option is declared here and used in the code that implements it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any, TypedDict, TypeVar

from ..spec.nearest import suggestion
from . import cuda_graphs
from .backends import BACKENDS

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class CompileOptions:
    """The options of ``consistent.compile``, checked at construction.

    Args:
        backend: "inductor", or "ops", which runs the recorded ops one by one.
        fullgraph: raise CannotRecord if the step cannot become a program. By default it then runs
            as written, with a warning that says why and where.
        tell_compiling: whether ``torch.compiler.is_compiling()`` is true while the step is
            recorded. Many models then skip code that depends on values; some take a path that only
            torch's own tracer supports.
        layouts: "auto" chooses the layouts of all ops of the step together, if that sends less than
            if each op chooses alone: the third call is also recorded, and the program that sends
            less is kept. None: each op chooses its layouts alone.
        memory: bytes that a rank may hold at a time for values that the step computes, not counting
            parameters, existing gradients, state and inputs. If a program would hold more, cheap
            values are recomputed for backward, and parameters are gathered again. ``show()``
            reports the bytes that are then held, which may still be more.
        overlap: start communication as early and wait for it as late as data and memory allow; a
            thread runs it meanwhile. "auto" does so if all ranks have spare cores for the thread.
            Without ``memory``, the results of up to two more messages may be held at a time.
        fuse: run a sum over ranks and the ops after it, or a matmul and its boxing, in one call of
            a native kernel. "auto" does so where it is faster, by tables and costs that are the
            same on all ranks; True does so wherever possible.
        cuda_graph: capture what runs on a GPU between messages as CUDA graphs, in the second run of
            the program, and replay them from then on.
        what: name of the call in error messages.

    Raises:
        ValueError: ``backend`` or ``layouts`` is unknown, ``memory`` is not a number of bytes,
            ``overlap`` or ``fuse`` is none of True, False and "auto", or ``cuda_graph`` is set
            where torch has no CUDA device.
        ImportError: ``layouts`` is "auto", and scipy is not installed.
    """

    backend: str = "inductor"
    fullgraph: bool = False
    tell_compiling: bool = True
    layouts: str | None = None
    memory: int | None = None
    overlap: bool | str = False
    fuse: bool | str = "auto"
    cuda_graph: bool = False
    what: InitVar[str] = "consistent.compile"

    def __post_init__(self, what: str) -> None:
        if self.backend not in BACKENDS:
            near, known = suggestion(self.backend, BACKENDS), ", ".join(BACKENDS)
            raise ValueError(f"{what}: backend is {self.backend!r}.{near} Give one of {known}.")
        self._check_layouts(what)
        memory, cuda_graph = self.memory, self.cuda_graph
        # The exact type, because bool is a subclass of int.
        if memory is not None and (type(memory) is not int or memory < 0):
            raise ValueError(
                f"{what}: memory is {memory!r}. Give a whole number of bytes, or None."
            )
        if self.overlap not in (True, False, "auto"):
            raise ValueError(f'{what}: overlap is {self.overlap!r}. Give True, False or "auto".')
        if self.fuse not in (True, False, "auto"):
            raise ValueError(f'{what}: fuse is {self.fuse!r}. Give True, False or "auto".')
        if cuda_graph not in (True, False):
            raise ValueError(f"{what}: cuda_graph is {cuda_graph!r}. Give True or False.")
        if cuda_graph and (why := cuda_graphs.capturer.why_not()):
            raise ValueError(
                f"{what}: cuda_graph is True, and {why}.\n  Only a GPU captures what it runs.\n"
                "  Leave it out, or give cuda_graph=torch.cuda.is_available()."
            )

    def _check_layouts(self, what: str) -> None:
        if self.layouts not in (None, "auto"):
            raise ValueError(f'{what}: layouts is {self.layouts!r}. Give "auto" or None.')
        if self.layouts == "auto" and importlib.util.find_spec("scipy") is None:
            raise ImportError(
                f'{what}: layouts="auto" is solved by scipy, and scipy is not installed.\n'
                "  pip install scipy, or pip install torch-consistent[auto]; or leave layouts= out."
            )


class Options(TypedDict, total=False):
    """The options as keywords, for type checkers and editors."""

    backend: str
    fullgraph: bool
    tell_compiling: bool
    layouts: str | None
    memory: int | None
    overlap: bool | str
    fuse: bool | str
    cuda_graph: bool


def shows_options(function: _F) -> _F:
    """Make ``help(function)`` list each option of ``CompileOptions`` with default and description.

    The list replaces the line ``options:`` of the docstring. Used as a decorator.
    """
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default)
        for f in dataclasses.fields(CompileOptions)
    ]
    function.__signature__ = signature.replace(parameters=[*parameters, *options])  # type: ignore
    # This parses the docstring: "Args:" begins the options, and "what:" must come after all of
    # them.
    docstring = inspect.cleandoc(CompileOptions.__doc__ or "")
    args_text = docstring.partition("Args:\n")[2].partition("\n    what:")[0]
    function.__doc__ = re.sub(
        r"^    options: .*", lambda _: args_text, inspect.getdoc(function) or "", flags=re.M
    )
    return function
