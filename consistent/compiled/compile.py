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

from mirrored.every_rank import gather_from_ranks
from mirrored.transports.failures import count_out_of_memory

from ..spec.nested import tensors_in
from .agree import least_and_most, message_signatures, messages_match, no_program_reason
from .backends import BACKENDS
from .errors import CannotRecord
from .key import key_of, key_without_sizes
from .layout_search import Trial
from .layout_search.trial import FollowingHooks, ListeningHooks
from .of_objects import PerObject
from .options import CompileOptions, Options, shows_options
from .rates import Varying
from .recording import Recorded, RecordingHooks, StepSettings, record
from .show import save_page
from .unsettled import Unsettled

# What a rank is about to do if it runs none of its programs, whose numbers start at 1.
_EAGER, _RECORD = -1, 0
TRIES = 3
MAX_KEYS = 1024  # keys of arguments that are remembered


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
        self._step, self._max_programs = step, most
        self._trial = Trial()
        backend = BACKENDS[self.options.backend]()
        self._settings = StepSettings(self.name, self.options, backend, Varying())
        self._entries: OrderedDict[int, tuple[Any, Recorded]] = OrderedDict()
        self._last_number = 0
        self._tries: OrderedDict[Any, int] = OrderedDict()
        # Keys of programs, without sizes.
        self._recorded_keys: OrderedDict[Any, None] = OrderedDict()
        self._steps_by_object = PerObject(self._bound_step)

    @property
    def programs(self) -> list[Recorded]:
        """The recordings that are kept, including failed ones; least recently used first."""
        return [recorded for _, recorded in self._entries.values()]

    def __get__(self, owner: Any, cls: Any = None) -> Any:
        """Return the compiled method of ``owner``, so that ``compile`` can decorate a method.

        Each object has programs of its own. On the class itself, return this object.
        """
        return self if owner is None else self._steps_by_object[owner]

    def _bound_step(self, owner: Any) -> CompiledStep:
        return CompiledStep(
            types.MethodType(self._step, owner), self.options, most=self._max_programs
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(args, kwargs)
        except Exception as error:
            count_out_of_memory(error)
            raise

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        # Called inside backward, such as by a hook or a checkpoint that recomputes: run as written.
        if torch._C._current_graph_task_id() != -1:
            return self._step(*args, **kwargs)
        key = key_of(args, kwargs)
        number = self._agree_on_program(self._find_program(key, args, kwargs))
        if number == _EAGER:
            if key is not None:
                self._tries.setdefault(key, 0)
                _drop_oldest_keys(self._tries)
            return self._step(*args, **kwargs)
        if number == _RECORD:
            return self._record(key, args, kwargs)
        self._entries.move_to_end(number)
        program = self._entries[number][1]
        if program.why is not None:
            return self._step(*args, **kwargs)
        if number in self._trial.pending:
            return self._record_with_joint_layouts(number, args, kwargs)
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

    def _find_program(self, key: Any, args: tuple, kwargs: dict[str, Any]) -> int:
        if key is None:  # arguments that cannot be compared
            return _EAGER
        tensors = tensors_in((args, kwargs))
        for number in reversed(self._entries):
            entry_key, program = self._entries[number]
            if entry_key == key and program.fits(tensors):
                return number
        # A first call must run as written, since optimizers make their state in it. If a program
        # exists for other sizes, that state exists, and the call is recorded at once.
        is_known = key in self._tries or key_without_sizes(key, args, kwargs) in self._recorded_keys
        return _RECORD if is_known else _EAGER

    def _agree_on_program(self, number: int) -> int:
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
        hooks = ListeningHooks() if self.options.layouts else RecordingHooks()
        result, recorded = record(self._settings, self._step, args, kwargs, hooks)
        if isinstance(recorded, Unsettled):
            self._tries[key] = self._tries.get(key, 0) + 1
            if self._tries[key] < TRIES:
                return result
            recorded = Recorded.failed(recorded.text(self.name))
        elif recorded.program is not None and not messages_match(
            gather_from_ranks(message_signatures(recorded.program))
        ):
            recorded = Recorded.failed(no_program_reason(self.name))
        self._last_number += 1
        self._entries[self._last_number] = key, recorded
        if recorded.why is None:
            self._recorded_keys[key_without_sizes(key, args, kwargs)] = None
            _drop_oldest_keys(self._recorded_keys)
        if len(self._entries) > self._max_programs:
            self._trial.pending.pop(self._entries.popitem(last=False)[0], None)
        if isinstance(hooks, ListeningHooks) and recorded.program is not None:
            self._trial.choose(self._last_number, recorded.program, hooks.chain)
        if recorded.why is not None:
            if self.options.fullgraph:
                raise CannotRecord(recorded.why)
            warnings.warn(
                f"{recorded.why}\n  This step runs as it is written, not as a program.",
                stacklevel=4,
            )
        return result

    def _record_with_joint_layouts(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record the step again with ``layouts="auto"``, and keep the program that sends less.

        In this second recording, each op gets the layouts that were chosen for all ops together
        after the first one, which is program ``number``. Return the result of the step.
        """
        key, op_by_op = self._entries[number]
        hooks = FollowingHooks(self._trial.pending[number])
        result, recorded = record(self._settings, self._step, args, kwargs, hooks)
        self._entries[number] = key, self._trial.better(number, op_by_op, recorded, hooks)
        return result


def _drop_oldest_keys(keys: OrderedDict[Any, Any]) -> None:
    while len(keys) > MAX_KEYS:
        keys.popitem(last=False)


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
    checked_options = CompileOptions(**options)
    make_step = functools.partial(CompiledStep, options=checked_options)
    return make_step if step is None else make_step(step)
