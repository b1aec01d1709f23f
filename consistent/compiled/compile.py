"""A step that is recorded once for inputs of a kind, and then run as a program."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from mirrored.transports.default import current

from ..dispatch import _C
from ..dispatch.planning import autocast
from ..dispatch.plans.shards import is_global
from ..nn.nested import map_tensors, tensors_in
from .backend import BACKENDS
from .errors import CannotRecord
from .memory import geometry, has_memory, storage_of
from .program import Program
from .recording import How, Recorded, record
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
        most: programs that are kept, the ones used last.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        backend: str = "inductor",
        fullgraph: bool = False,
        tell_compiling: bool = True,
        most: int = 16,
    ) -> None:
        check_backend("consistent.compile", backend)
        functools.update_wrapper(self, step)
        self.name = getattr(step, "__qualname__", type(step).__name__)
        self.backend = backend
        self._step, self._most = step, most
        self._fullgraph = fullgraph
        self._how = How(self.name, tell_compiling, BACKENDS[backend])
        self._entries: OrderedDict[int, tuple[Any, Recorded]] = OrderedDict()
        self._number = 0
        self._tries: OrderedDict[Any, int] = OrderedDict()
        self._of_objects: Any = weakref.WeakKeyDictionary()

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
                most=self._most,
            )
        return self._of_objects[owner]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            return self._step(*args, **kwargs)
        key = _key(args, kwargs)
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
        return program.run(args, kwargs)

    def show(self) -> str:
        """The programs as text, the one used last at the end."""
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
        numbers = _told(number)
        return number if len(set(numbers)) == 1 else min(_RECORD, *numbers)

    # -- recording ---------------------------------------------------------------------------------

    def _record(self, key: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        result, made = record(self._how, self._step, args, kwargs)
        if isinstance(made, Unsettled):
            mine: Any = "unsettled"
        else:
            mine = "failed" if made.program is None else _sent(made.program)
        every = _gathered(mine)
        if "unsettled" in every:  # on all ranks alike, so that they go on counting alike
            self._tries[key] = self._tries.get(key, 0) + 1
            if self._tries[key] < TRIES:
                return result
            if isinstance(made, Unsettled):
                made = Recorded.failed(made.text(self.name))
            else:
                made = Recorded.failed(f"{self.name}: on another rank each call changes its state.")
        elif isinstance(made, Recorded) and made.why is None and not _fit_together(every):
            made = Recorded.failed(
                f"{self.name}: ranks could not record the step, or recorded other messages."
            )
        assert isinstance(made, Recorded)
        self._number += 1
        self._entries[self._number] = key, made
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)
        if made.why is not None:
            if self._fullgraph:
                raise CannotRecord(made.why)
            warnings.warn(
                f"{made.why}\n  This step runs as it is written, not as a program.", stacklevel=3
            )
        return result


def compile_step(
    step: Callable[..., Any] | None = None,
    *,
    backend: str = "inductor",
    fullgraph: bool = False,
    tell_compiling: bool = True,
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

    Raises:
        ValueError: the backend is not known.
    """
    if step is None:
        return functools.partial(
            CompiledStep, backend=backend, fullgraph=fullgraph, tell_compiling=tell_compiling
        )
    return CompiledStep(step, backend=backend, fullgraph=fullgraph, tell_compiling=tell_compiling)


def check_backend(what: str, backend: str) -> None:
    """Raises ValueError if no backend is called so."""
    if backend not in BACKENDS:
        raise ValueError(f"{what}: backend is {backend!r}. Give one of {', '.join(BACKENDS)}.")


def _told(number: int) -> list[int]:
    """That of every rank."""
    transport = current()
    if transport.size == 1:
        return [number]
    ranks = tuple(range(transport.size))
    mine = torch.tensor([number])
    return torch.cat(transport.all_gather(mine, [(1,)] * transport.size, ranks)).tolist()


def _sent(program: Program) -> list[tuple]:
    return [(call.kind, call.op, call.ranks) for call in program.messages()]


def _gathered(mine: Any) -> list[Any]:
    transport = current()
    if transport.size == 1:
        return [mine]
    return transport.gather_objects(mine, tuple(range(transport.size)))


def _fit_together(every: list[Any]) -> bool:
    """Whether every two ranks have the same messages to send each other."""
    if "failed" in every:
        return False
    for a, b in itertools.combinations(range(len(every)), 2):
        both = [[m for m in every[r] if a in m[2] and b in m[2]] for r in (a, b)]
        if both[0] != both[1]:
            return False
    return True


def _key(args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a program is found by: what is given, and the modes around. None if what is given cannot
    be compared."""
    tensors = tensors_in((args, kwargs))
    memories = [storage_of(x) if has_memory(x) else -1 - i for i, x in enumerate(tensors)]
    shared = tuple(
        (memories.index(m), geometry(x)[0] if memories.count(m) > 1 else 0)
        for m, x in zip(memories, tensors, strict=True)
    )
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast.now(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        _C.is_synced(),
    )
    try:
        return _frozen(map_tensors((args, kwargs), _shown)), shared, modes
    except TypeError:
        return None


def _shown(x: Any) -> Any:
    if is_global(x):
        return x._spec, x.requires_grad
    return (
        tuple(x.shape),
        x.stride() if has_memory(x) else x.layout,
        x.dtype,
        x.device,
        x.requires_grad,
    )


def _frozen(value: Any) -> Any:
    """Raises TypeError for what has no value that can be compared."""
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, *map(_frozen, value)
    if isinstance(value, set | frozenset):
        return type(value).__name__, frozenset(map(_frozen, value))
    if isinstance(value, slice):
        return "slice", value.start, value.stop, value.step
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (getattr(value, f.name) for f in dataclasses.fields(value))
        return type(value), *map(_frozen, fields)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        array: Any = value
        return "numpy", array.shape, str(array.dtype), array.tobytes()
    hash(value)
    return type(value), value
