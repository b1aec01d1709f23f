"""``consistent.compile``: a step that is recorded once for each kind of inputs, and then run as a
compiled program."""

from __future__ import annotations

import functools
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import torch

from mirrored.every_rank import gathered
from mirrored.transports.failures import count_lack

from ..spec.nested import tensors_in
from .agree import fit_together, least_and_most, no_program, sent
from .backends import BACKENDS
from .errors import CannotRecord
from .key import key_of, kind_of
from .layout_search import Trial
from .layout_search.trial import Following, Listening
from .of_objects import OfObjects
from .options import CompileOptions, Options, shows_options
from .rates import Varying
from .recording import Around, Recorded, StepSettings, record
from .show import save_page
from .unsettled import Unsettled

# What a rank is about to do if it runs none of its programs, whose numbers start at 1.
_EAGER, _RECORD = -1, 0
TRIES = 3
MOST_KEYS = 1024  # keys of arguments that are remembered


class CompiledStep:
    """The callable that ``consistent.compile`` returns.

    It runs ``step`` as written in the first call with some kind of inputs, records it in the
    second, and from then on runs the recorded program. There is one program for each combination of
    sizes, modes and Python state that a recording depends on.

    Args:
        step: a function, which may call modules, ``backward()`` and optimizers.
        options: the options of ``consistent.compile``.
        most: largest number of programs that are kept; the least recently used is dropped first.
    """

    def __init__(
        self, step: Callable[..., Any], options: CompileOptions | None = None, *, most: int = 64
    ) -> None:
        functools.update_wrapper(self, step)
        self.name = getattr(step, "__qualname__", type(step).__name__)
        self.options = CompileOptions() if options is None else options
        self._step, self._most = step, most
        self._trial = Trial()
        backend = BACKENDS[self.options.backend]()
        self._how = StepSettings(self.name, self.options, backend, Varying())
        self._entries: OrderedDict[int, tuple[Any, Recorded]] = OrderedDict()
        self._number = 0
        self._tries: OrderedDict[Any, int] = OrderedDict()
        self._kinds: OrderedDict[Any, None] = OrderedDict()  # keys of programs, without sizes
        self._of_objects = OfObjects(self._bound)

    @property
    def programs(self) -> list[Recorded]:
        """The recordings that are kept, including failed ones; least recently used first."""
        return [made for _, made in self._entries.values()]

    def __get__(self, owner: Any, cls: Any = None) -> Any:
        """Return the compiled method of ``owner``, so that ``compile`` can decorate a method.

        Each object has programs of its own. On the class itself, return this object.
        """
        return self if owner is None else self._of_objects[owner]

    def _bound(self, owner: Any) -> CompiledStep:
        return CompiledStep(types.MethodType(self._step, owner), self.options, most=self._most)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(args, kwargs)
        except Exception as error:
            count_lack(error)
            raise

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        # Called inside backward, such as by a hook or a checkpoint that recomputes: run as written.
        if torch._C._current_graph_task_id() != -1:
            return self._step(*args, **kwargs)
        key = key_of(args, kwargs)
        number = self._agree(self._find(key, args, kwargs))
        if number == _EAGER:
            if key is not None:
                self._tries.setdefault(key, 0)
                _shorten(self._tries)
            return self._step(*args, **kwargs)
        if number == _RECORD:
            return self._record(key, args, kwargs)
        self._entries.move_to_end(number)
        program = self._entries[number][1]
        if program.why is not None:
            return self._step(*args, **kwargs)
        if number in self._trial.pending:
            return self._record_together(number, args, kwargs)
        return program.run(args, kwargs)

    def show(self, path: str | Path | None = None) -> str:
        """Return the programs of this rank as text, least recently used first; send nothing.

        With ``path``, also write the program used last as a self-contained HTML page: the lines of
        the step with what they compute and send, and every op.

        Raises:
            ValueError: ``path`` does not end in .html.
            RuntimeError: a page is requested, and nothing has been recorded yet.
        """
        if path is not None:
            save_page(path, self.name, self.programs)
        return "\n\n".join(str(program) for program in self.programs)

    # -- which program -----------------------------------------------------------------------------

    def _find(self, key: Any, args: tuple, kwargs: dict[str, Any]) -> int:
        if key is None:  # arguments that cannot be compared
            return _EAGER
        given = tensors_in((args, kwargs))
        for number in reversed(self._entries):
            known, program = self._entries[number]
            if known == key and program.fits(given):
                return number
        # A first call must run as written, since optimizers make their state in it. If a program
        # exists for other sizes of the same kind, that state exists, and the call is recorded at
        # once.
        known = key in self._tries or kind_of(key, args, kwargs) in self._kinds
        return _RECORD if known else _EAGER

    def _agree(self, number: int) -> int:
        """Return what all ranks do in this call, given what this rank would do alone.

        ``number`` and the result are the number of a program to run, ``_RECORD``, or ``_EAGER``
        (run the step as written). Ranks can differ where the shapes of plain tensors differ. Then
        all run the step as written if any rank needs that; otherwise all record it.
        """
        least, most = least_and_most(number)
        # If any rank is at _EAGER, the least is -1, and all run eagerly; otherwise all record.
        return number if least == most else min(_RECORD, least)

    # -- recording ---------------------------------------------------------------------------------

    def _record(self, key: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        around = Listening() if self.options.layouts else Around()
        result, made = record(self._how, self._step, args, kwargs, around)
        if isinstance(made, Unsettled):
            self._tries[key] = self._tries.get(key, 0) + 1
            if self._tries[key] < TRIES:
                return result
            made = Recorded.failed(made.text(self.name))
        elif made.program is not None and not fit_together(gathered(sent(made.program))):
            made = Recorded.failed(no_program(self.name))
        self._number += 1
        self._entries[self._number] = key, made
        if made.why is None:
            self._kinds[kind_of(key, args, kwargs)] = None
            _shorten(self._kinds)
        if len(self._entries) > self._most:
            self._trial.pending.pop(self._entries.popitem(last=False)[0], None)
        if isinstance(around, Listening) and made.program is not None:
            self._trial.choose(self._number, made.program, around.chain)
        if made.why is not None:
            if self.options.fullgraph:
                raise CannotRecord(made.why)
            warnings.warn(
                f"{made.why}\n  This step runs as it is written, not as a program.", stacklevel=4
            )
        return result

    def _record_together(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record the step again with ``layouts="auto"``, and keep the program that sends less.

        In this second recording, each op gets the layouts that were chosen for all ops together
        after the first one, which is program ``number``. Return the result of the step.
        """
        key, alone = self._entries[number]
        around = Following(self._trial.pending[number])
        result, made = record(self._how, self._step, args, kwargs, around)
        self._entries[number] = key, self._trial.better(number, alone, made, around)
        return result


def _shorten(known: OrderedDict[Any, Any]) -> None:
    while len(known) > MOST_KEYS:
        known.popitem(last=False)


@shows_options
def compile_step(step: Callable[..., Any] | None = None, **options: Unpack[Options]) -> Any:
    """Run a training step as one compiled program: forward, backward, optimizer, and all
    communication between ranks.

    ```
    @consistent.compile
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss
    ```

    The first call runs the step as written, so that optimizers create their state. The second call
    is recorded while it runs. Later calls run the program as long as shapes, modes (such as
    autocast), and the Python numbers and objects that the step can reach are unchanged; otherwise
    the step is recorded again. If only sizes vary, further sizes are recorded in their first call
    and share compiled code. Every rank must make the same calls of the step. Tensors that it
    returns have no autograd graph: call ``backward()`` inside.

    Args:
        step: a function, or a module whose forward needs no gradients.
        options: the fields of ``consistent.compiled.CompileOptions``, as keywords.

    Raises:
        ValueError, ImportError: an option is not available; ``CompileOptions`` lists the cases.
    """
    given = CompileOptions(**options)
    made = functools.partial(CompiledStep, options=given)
    return made if step is None else made(step)
