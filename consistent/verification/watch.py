"""Recording of what one rank computes in a step: op results, gradients, parameters, return values.

Recording sends nothing: of a global tensor this rank's shard is kept with its spec, and the shards
are put together afterwards.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from mirrored.transports.faults.place import user_line

from ..spec import TensorSpec
from ..spec.nested import each_in, tensors_in
from ..tensor.global_tensor import GlobalTensor
from . import in_float64

# Results of these ops are not recorded: the ops around them have the same values.
_UNSEEN = frozenset({"detach", "requires_grad_", "register_hook", "retain_grad", "to_global"})
# These ops draw random numbers. Those of global tensors are not torch's own (docs/how_do_i.md).
_DRAWING = frozenset(
    """dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout dropout_ bernoulli
    bernoulli_ multinomial rand_like randn_like randint_like normal_ uniform_ exponential_ rrelu
    gumbel_softmax""".split()
)
# These ops cast, or do nothing: which of the two may differ between runs of different dtypes.
_CASTS = frozenset("to float double half bfloat16 type type_as".split())
# These ops return indices with the values, and rounding decides between two nearly equal values.
# Name -> position of ``dim`` among the arguments.
_CHOOSING = {"topk": 2, "kthvalue": 2, "sort": 1, "max": 1, "min": 1, "median": 1}
_SORTS = (torch.sort, torch.argsort, Tensor.sort, Tensor.argsort)
# Parts of parameter names that wrappers such as DDP add.
_WRAPPED = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


class Key(NamedTuple):
    """Identity of a tensor of a step, equal in every run of the step, so that runs can be compared.

    ``what`` is "given" (an op's input), "result", "chosen" (indices), "gradient" (of a result),
    "parameter gradient", "parameter" (after a step), or "returned" (by the program). ``name`` is
    that of the op and its module, or of the parameter. ``number`` counts, from 0, the tensors that
    have the same ``what`` and ``name``.
    """

    what: str
    name: str
    number: int


class Seen(NamedTuple):
    """A recorded tensor as this rank holds it, and the line of the program that made it.

    With a ``spec`` the ``value`` is this rank's shard of a global tensor. Without a ``spec`` it is
    plain; if it is the whole of a DTensor, ``laid`` is the layout of the DTensor.
    """

    key: Key
    value: Tensor
    spec: TensorSpec | None
    where: str
    laid: str = ""


class StepRecorder:
    """Recorder of the tensors of one step on one rank, in the order in which they are computed.

    The step runs in the context ``watching``, and gets ``place`` as its argument. Then ``finish``
    is called with its result, and ``seen`` has the tensors.

    Args:
        prepare: applies the plan of this run to a model.
        double: whether the step runs in float64.
    """

    def __init__(self, prepare: Callable[[nn.Module], nn.Module], double: bool = False) -> None:
        self.seen: list[Seen] = []
        self.double = double  # the step runs in float64
        self.draws = False
        self.used: dict[str, str] = {}  # parameter -> the line that used it first
        self._prepare = prepare
        self._counts = Counter[tuple[str, str]]()
        self._models: list[nn.Module] = []
        self._modules: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._inside: list[tuple[str, nn.Module]] = []  # modules that run, the innermost last
        self._casts: list[Tensor] = []  # of parameters; kept so that no id is reused
        self._steps = False  # an optimizer's step is running
        self._notes = False  # ops of this recorder are running

    def place(self, model: nn.Module) -> nn.Module:
        """Return ``model`` with the plan of this run applied, and note the names of its modules.

        It is the argument with which the user's step is called.
        """
        model = self._prepare(model)
        self._models.append(model)
        self._modules |= {id(module): _plain_name(n) for n, module in model.named_modules()}
        return model

    def keep(self, what: str, name: str, value: Tensor, where: str, is_known: bool = True) -> None:
        """Record one tensor.

        Args:
            what: kind of tensor, see ``Key``.
            name: name of the op with its module, or of the parameter.
            value: the tensor.
            where: the line of the program.
            is_known: False if another run may record another tensor at this place; then the tensor
                is only counted.
        """
        self._notes = True
        spec, found, laid = _held(value)
        self._notes = False
        if found is None:
            return
        number = self._counts[what, name]
        self._counts[what, name] += 1
        if is_known:
            self.seen.append(Seen(Key(what, name, number), found, spec, where, laid))

    def op(self, func: Any, given: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """Record an op of the user's program: inputs, results, and later the results' gradients.

        Args:
            func: the function of torch.
            given: its positional arguments.
            kwargs: its keyword arguments.
            out: its result.
        """
        name = getattr(func, "__name__", "")
        if not self._models or name.startswith(("__", "empty", "new_empty")) or name in _UNSEEN:
            return  # ops before the model is placed make the model and the data
        if self._notes or self._steps or _is_library():
            return  # inside an optimizer's step tensors have any layout; parameters follow later
        if name in _CASTS:
            return self._cast(given, out)
        self.draws |= name in _DRAWING
        where = user_line()
        called = f"{name} in {self._inside[-1][0]}" if self._inside else name
        operands, is_known = _operands(name, given)
        for x in operands:
            parameter = self._parameter(x)
            if parameter is not None:
                self.used.setdefault(parameter, where)
            elif _is_compared(x) and out is not x:  # an in-place op has overwritten its input
                self.keep("given", called, x, where, is_known)
        for x in out if isinstance(out, tuple | list) else (out,):
            if not _is_compared(x):
                continue
            self.keep("result", called, x, where)
            if x.requires_grad and x.grad_fn is not None:
                x.register_hook(partial(self._gradient, called, where))
        if name in _CHOOSING and isinstance(out, tuple) and out[1].ndim:
            self._notes = True
            at = _at_places(given[0], out[1], (*given[_CHOOSING[name] :], kwargs.get("dim", -1))[0])
            self._notes = False
            self.keep("result", f"{called}, at its places", at, where)
            self.keep("chosen", called, out[1], where)

    def _cast(self, given: tuple, out: Any) -> None:
        """Note that ``out``, a cast of a parameter, stands for the parameter from here on."""
        parameter = self._parameter(given[0]) if isinstance(given[0], Tensor) else None
        if parameter is not None and isinstance(out, Tensor) and out is not given[0]:
            self.used.setdefault(parameter, user_line())
            self._names[id(out)] = parameter
            self._casts.append(out)

    def _parameter(self, x: Tensor) -> str | None:
        """Return the name of the parameter that ``x`` is, or stands for while a module runs.

        A tensor stands for a parameter if a plan has put it in the parameter's place, or if it is a
        cast of it. "" if the name is unknown, None if ``x`` is not a parameter.
        """
        if id(x) in self._names:
            return self._names[id(x)]
        for owner in self._inside[-1][1].modules() if self._inside else ():
            for key, p in owner._parameters.items():
                if p is not None and (x is p or x is owner.__dict__.get(key)):
                    return self._names.get(id(p), "")
        return None

    def _gradient(self, called: str, where: str, gradient: Tensor | None) -> None:
        """Record the gradient of the result of an op; autograd calls this as a hook."""
        if gradient is not None:
            self.keep("gradient", called, gradient, where)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of all models, without the parts of names that wrappers add."""
        for model in self._models:
            yield from ((_plain_name(name), p) for name, p in model.named_parameters())

    def before_step(self, *given: Any) -> None:
        """Record the gradients that an optimizer is about to use; torch calls it as a hook."""
        self._steps = True
        for name, p in self.parameters():
            if p.grad is not None:
                self.keep("parameter gradient", name, p.grad, self.used.get(name, ""))

    def after_step(self, *given: Any) -> None:
        """Record the parameters after an optimizer's step; torch calls it as a hook."""
        self._steps = False
        for name, p in self.parameters():
            self.keep("parameter", name, p, self.used.get(name, ""))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record everything that this thread runs inside the context."""
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]
        try:
            with _Ops(self):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self, returned: Any) -> None:
        """Record what the step returned, and, if no optimizer has run, the gradients.

        It is called once, after the step.
        """
        if not any(seen.key.what == "parameter" for seen in self.seen):
            self.before_step()
        numbers = [torch.tensor(x, dtype=torch.float64) for x in each_in(returned, float)]
        for value in [*tensors_in(returned), *numbers]:
            self.keep("returned", "result of the step", value, "")

    def _enter(self, module: nn.Module, given: Any) -> None:
        """Note that ``module`` begins to run; a hook before each forward."""
        self._names |= {
            id(p): name for name, p in self.parameters() if not self._inside
        }  # read again at each call of a model, since a plan may have replaced parameters
        self._inside.append((self._modules.get(id(module), type(module).__name__), module))

    def _leave(self, module: nn.Module, given: Any, out: Any) -> None:
        """Note that the innermost module has ended; a hook after each forward."""
        with suppress(IndexError):
            self._inside.pop()


class _Ops(TorchFunctionMode):
    """Mode that calls each function of torch and passes it to the recorder with its result."""

    def __init__(self, watch: StepRecorder) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SORTS and "stable" not in kwargs:
            # Torch leaves the order of equal numbers open, and it differs from process to process.
            kwargs |= zip(("dim", "descending"), args[1:], strict=False)
            args, kwargs = args[:1], kwargs | {"stable": True}
        out = in_float64.call(func, args, kwargs) if self._watch.double else func(*args, **kwargs)
        self._watch.op(func, args, kwargs, out)
        return out


def _at_places(x: Any, places: Any, dim: int) -> Tensor:
    """Return the values of ``x`` at the indices ``places`` along ``dim``, which topk or max chose.

    Where two values are nearly equal, runs may choose other indices, but the values agree.
    """
    with torch.no_grad():
        if hasattr(x, "full_tensor"):  # DTensor has no rule for take_along_dim
            x, places = x.full_tensor(), places.full_tensor()
        whole = places if places.ndim == x.ndim else places.unsqueeze(dim)
        return torch.take_along_dim(x, whole, dim)


def _operands(name: str, given: tuple) -> tuple[list[Tensor], bool]:
    """Return (tensors among the arguments of an op, whether every run has them in this order).

    For ``plain * global`` Python calls the right operand first, which swaps the operands, so their
    order differs between runs. The two are sorted by their numbers of dims; if these are equal, the
    order is unknown.
    """
    found = list(tensors_in(given))
    if name not in ("add", "mul") or len(found) != 2:
        return found, True
    found.sort(key=lambda x: -x.ndim)
    mixed = len({isinstance(x, GlobalTensor) for x in found}) == 2
    return found, not mixed or found[0].ndim != found[1].ndim


def _is_compared(x: Any) -> bool:
    return isinstance(x, Tensor) and is_rounded(x)


def is_rounded(x: Tensor) -> bool:
    """Return whether arithmetic in the dtype of ``x`` rounds: floats and complex numbers do."""
    return x.is_floating_point() or x.is_complex()


def _held(value: Any) -> tuple[TensorSpec | None, Tensor | None, str]:
    """Return (spec, copy, layout) of a tensor that is to be recorded.

    For a global tensor: its spec and this rank's shard. For a DTensor: the whole tensor, and the
    layout as text. For a plain tensor: the copy alone. The copy is None on the meta device.
    """
    with torch.no_grad():
        if isinstance(value, GlobalTensor):
            local = value.to_local().detach()
            return value._spec, None if local.is_meta else local.clone(), ""
        if hasattr(value, "full_tensor"):  # a DTensor: the tensor that it stands for
            return None, value.full_tensor().detach().clone(), f"DTensor {value.placements}"
        return None, None if value.is_meta else value.detach().clone(), ""


def _plain_name(name: str) -> str:
    """Return the name of a parameter without the parts that wrappers such as DDP add."""
    for word in _WRAPPED:
        name = f"{name}.".replace(word, "").removesuffix(".")
    return name


def _is_library() -> bool:
    """Return whether an op was called by this library's code, and not by the user's program.

    The innermost caller outside of torch and this package decides.
    """
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        top = module.partition(".")[0]
        if top != "torch" and not module.startswith(__package__):
            return top in ("consistent", "mirrored")
        frame = frame.f_back
    return False
