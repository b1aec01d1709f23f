"""A step that is recorded once for inputs of a kind, and then run as a program."""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..nn.nested import tensors_in
from .agree import fit_together, gathered, sent, told
from .backend import BACKENDS
from .checks import (
    check_backend,
    check_cuda_graph,
    check_fuse,
    check_layouts,
    check_memory,
    check_overlap,
)
from .errors import CannotRecord
from .key import key_of
from .rates import Varying
from .recording import Around, How, Recorded, record
from .show import save_page
from .together import Trial
from .together.trial import Following, Listening
from .unsettled import Unsettled

# What a rank is about to do, where it runs none of its programs.
_EAGER, _RECORD = -1, 0
TRIES = 3
MOST_KEYS = 1024  # kinds of arguments that are known to have been met


class CompiledStep:
    """Calls ``step``; from the second call on what it did is run as one compiled program.

    Args:
        step: a function, which may call modules, ``backward()`` and optimizers.
        backend: "inductor", or "ops", which runs what was recorded op by op.
        fullgraph: raise CannotRecord where ``step`` cannot be a program; by default it then runs as
            it is written, with one warning that says why.
        tell_compiling: whether ``torch.compiler.is_compiling()`` is true while the step is
            recorded. Many models then leave out what depends on values.
        layouts: "auto" chooses the layouts of all ops together; None leaves it to each op.
        memory: bytes that a program may hold at a time beside parameters, state and inputs.
        overlap: whether messages run beside ops; "auto": where all ranks have cores to spare.
        fuse: whether messages are one call with the ops beside them; "auto": where that wins.
        cuda_graph: whether what runs between messages is captured as CUDA graphs.
        most: programs that are kept, the ones used last.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        backend: str = "inductor",
        fullgraph: bool = False,
        tell_compiling: bool = True,
        layouts: str | None = None,
        memory: int | None = None,
        overlap: bool | str = False,
        fuse: bool | str = "auto",
        cuda_graph: bool = False,
        most: int = 16,
    ) -> None:
        check_backend("consistent.compile", backend)
        check_layouts("consistent.compile", layouts)
        check_memory("consistent.compile", memory)
        check_overlap("consistent.compile", overlap)
        check_fuse("consistent.compile", fuse)
        check_cuda_graph("consistent.compile", cuda_graph)
        functools.update_wrapper(self, step)
        self.name = getattr(step, "__qualname__", type(step).__name__)
        self.backend = backend
        self._step, self._most = step, most
        self._fullgraph, self.layouts, self.memory = fullgraph, layouts, memory
        self.overlap, self.fuse, self.cuda_graph = overlap, fuse, cuda_graph
        self._trial = Trial()
        self._how = How(
            self.name,
            tell_compiling,
            BACKENDS[backend],
            memory,
            overlap,
            fuse,
            cuda_graph,
            Varying(),
        )
        self._entries: OrderedDict[int, tuple[Any, Recorded]] = OrderedDict()
        self._number = 0
        self._tries: OrderedDict[Any, int] = OrderedDict()
        self._of_objects: Any = weakref.WeakKeyDictionary()

    @property
    def how(self) -> dict[str, Any]:
        """What it was asked for, beside how failures are treated."""
        made = {"backend": self.backend, "layouts": self.layouts, "memory": self.memory}
        made.update(overlap=self.overlap, fuse=self.fuse, cuda_graph=self.cuda_graph)
        return made

    @property
    def programs(self) -> list[Recorded]:
        """The programs so far, the one used last at the end."""
        return [made for _, made in self._entries.values()]

    def __get__(self, owner: Any, cls: Any = None) -> Any:
        """A step that is a method has programs for each object."""
        if owner is None:
            return self
        if owner not in self._of_objects:
            self._of_objects[owner] = CompiledStep(
                types.MethodType(self._step, owner),
                backend=self.backend,
                fullgraph=self._fullgraph,
                tell_compiling=self._how.compiling,
                layouts=self.layouts,
                memory=self.memory,
                overlap=self.overlap,
                fuse=self.fuse,
                cuda_graph=self.cuda_graph,
                most=self._most,
            )
        return self._of_objects[owner]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            return self._step(*args, **kwargs)
        key = key_of(args, kwargs)
        number = self._agree(self._find(key, tensors_in((args, kwargs))))
        if number == _EAGER:
            if key is not None:
                self._tries.setdefault(key, 0)
                while len(self._tries) > MOST_KEYS:
                    self._tries.popitem(last=False)
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
        """The programs as text, the one used last at the end. That one is written to ``path``, too,
        as an HTML page that needs nothing beside it: the lines of the step with what they make and
        send, and every op. Only this rank's program; nothing is communicated.

        Raises:
            ValueError: ``path`` does not end in .html.
            RuntimeError: a page is asked for, and nothing was recorded yet.
        """
        if path is not None:
            save_page(path, self.name, self.programs)
        return "\n\n".join(str(program) for program in self.programs)

    # -- which program -----------------------------------------------------------------------------

    def _find(self, key: Any, given: list[Any]) -> int:
        if key is None:  # arguments that cannot be compared
            return _EAGER
        for number in reversed(self._entries):
            known, program = self._entries[number]
            if known == key and program.fits(given):
                return number
        return _RECORD if key in self._tries else _EAGER

    def _agree(self, number: int) -> int:
        """What all ranks do. They differ where shapes of plain tensors do: then all run the step as
        it is written, and record it the next time."""
        numbers = told(number)
        return number if len(set(numbers)) == 1 else min(_RECORD, *numbers)

    # -- recording ---------------------------------------------------------------------------------

    def _record(self, key: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        around = Listening() if self.layouts else Around()
        result, made = record(self._how, self._step, args, kwargs, around)
        if isinstance(made, Unsettled):
            mine: Any = "unsettled"
        else:
            mine = sent(made.program)
        every = gathered(mine)
        if "unsettled" in every:  # on all ranks alike, so that they go on counting alike
            self._tries[key] = self._tries.get(key, 0) + 1
            if self._tries[key] < TRIES:
                return result
            if isinstance(made, Unsettled):
                made = Recorded.failed(made.text(self.name))
            else:
                made = Recorded.failed(f"{self.name}: on another rank each call changes its state.")
        elif isinstance(made, Recorded) and made.why is None and not fit_together(every):
            made = Recorded.failed(
                f"{self.name}: ranks could not record the step, or recorded other messages."
            )
        assert isinstance(made, Recorded)
        self._number += 1
        self._entries[self._number] = key, made
        if len(self._entries) > self._most:
            self._trial.pending.pop(self._entries.popitem(last=False)[0], None)
        if isinstance(around, Listening) and made.program is not None:
            self._trial.choose(self._number, made.program, around.chain)
        if made.why is not None:
            if self._fullgraph:
                raise CannotRecord(made.why)
            warnings.warn(
                f"{made.why}\n  This step runs as it is written, not as a program.", stacklevel=3
            )
        return result

    def _record_together(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record the step once more, with the layouts that were chosen for its ops."""
        key, alone = self._entries[number]
        around = Following(self._trial.pending[number])
        result, made = record(self._how, self._step, args, kwargs, around)
        self._entries[number] = key, self._trial.better(number, alone, made, around)
        return result


def compile_step(
    step: Callable[..., Any] | None = None,
    *,
    backend: str = "inductor",
    fullgraph: bool = False,
    tell_compiling: bool = True,
    layouts: str | None = None,
    memory: int | None = None,
    overlap: bool | str = False,
    fuse: bool | str = "auto",
    cuda_graph: bool = False,
) -> Any:
    """Run a training step as one compiled program: forward, backward, optimizer, and what is sent
    between ranks.

    ```
    @consistent.compile
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss
    ```

    The first call runs as it is written, so that optimizers make their state. The second is
    recorded while it runs, and later ones run the program, as long as shapes, modes, and the
    numbers that the step can reach are the same; else it is recorded anew. Every rank calls the
    step alike. Tensors that it returns have no graph: call ``backward()`` inside.

    Args:
        step: a function, or a module whose forward needs no gradients.
        backend: "inductor", or "ops", which runs what was recorded op by op.
        fullgraph: raise CannotRecord where the step cannot be a program. By default it runs as it
            is written, with a warning that says why and where.
        tell_compiling: whether ``torch.compiler.is_compiling()`` is true while the step is
            recorded. Many models then leave out what depends on values; some take a way that only
            torch's own tracer can go.
        layouts: "auto" chooses the layouts of all ops of the step together, where that sends less
            than choosing op by op: the third call is recorded, too, and the program that sends
            less is kept. None: each op chooses alone.
        memory: bytes that a rank may hold at a time of what the step makes, beside parameters,
            gradients that were there, state and inputs. Where a program would hold more, what is
            cheap is computed again for backward, and parameters are gathered again. What is then
            held is in ``show()``.
        overlap: start messages as early and wait for them as late as data and memory allow; a
            thread sends them meanwhile. "auto" does so where all ranks have cores to spare for it.
            Without ``memory``, two results more may be held at a time than else.
        fuse: do a sum over ranks and the ops after it, or a product and its boxing, in one call of
            a native kernel: "auto" where that is faster, by tables and costs that are the same on
            all ranks; True wherever it can be done.
        cuda_graph: capture what runs on a GPU between messages as CUDA graphs, in the second run of
            the program, and replay them from then on.

    Raises:
        ValueError: the backend is not known, ``layouts`` is neither, or ``memory`` is no number
            of bytes, or ``overlap`` or ``fuse`` is none of True, False and "auto"; or
            ``cuda_graph`` is asked for where torch has no CUDA device.
        ImportError: ``layouts`` is "auto", and scipy is not installed.
    """
    made = functools.partial(
        CompiledStep,
        backend=backend,
        fullgraph=fullgraph,
        tell_compiling=tell_compiling,
        layouts=layouts,
        memory=memory,
        overlap=overlap,
        fuse=fuse,
        cuda_graph=cuda_graph,
    )
    return made if step is None else made(step)
