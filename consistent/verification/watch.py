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
from ..spec.nested import instances_in, tensors_in
from ..tensor.global_tensor import GlobalTensor
from . import in_float64

# Results of these ops are not recorded: the ops around them have the same values.
_UNRECORDED = frozenset({"detach", "requires_grad_", "register_hook", "retain_grad", "to_global"})
# These ops draw random numbers. Those of global tensors are not torch's own (docs/how_do_i.md).
_RANDOM_OPS = frozenset(
    """dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout dropout_ bernoulli
    bernoulli_ multinomial rand_like randn_like randint_like normal_ uniform_ exponential_ rrelu
    gumbel_softmax""".split()
)
# These ops cast, or do nothing: which of the two may differ between runs of different dtypes.
_CASTS = frozenset("to float double half bfloat16 type type_as".split())
# These ops return indices with the values, and rounding decides between two nearly equal values.
# Name -> position of ``dim`` among the arguments.
_CHOICE_OPS = {"topk": 2, "kthvalue": 2, "sort": 1, "max": 1, "min": 1, "median": 1}
_SORTS = (torch.sort, torch.argsort, Tensor.sort, Tensor.argsort)
# Parts of parameter names that wrappers such as DDP add.
_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


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


class RecordedTensor(NamedTuple):
    """A recorded tensor as this rank holds it, and the line of the program that made it.

    With a ``spec`` the ``value`` is this rank's shard of a global tensor. Without a ``spec`` it is
    plain; if it is the whole of a DTensor, ``dtensor_layout`` is the layout of the DTensor.
    """

    key: Key
    value: Tensor
    spec: TensorSpec | None
    where: str
    dtensor_layout: str = ""


class StepRecorder:
    """Recorder of the tensors of one step on one rank, in the order in which they are computed.

    The step runs in the context ``watching``, and gets ``place`` as its argument. Then ``finish``
    is called with its result, and ``seen`` has the tensors.

    Args:
        prepare: applies the plan of this run to a model.
        double: whether the step runs in float64.
    """

    def __init__(self, prepare: Callable[[nn.Module], nn.Module], double: bool = False) -> None:
        self.seen: list[RecordedTensor] = []
        self.double = double  # the step runs in float64
        self.draws = False
        self.used: dict[str, str] = {}  # parameter -> the line that used it first
        self._prepare = prepare
        self._counts = Counter[tuple[str, str]]()
        self._models: list[nn.Module] = []
        self._modules: dict[int, str] = {}
        self._names: dict[int, str] = {}
        # Modules that run, the innermost last.
        self._running_modules: list[tuple[str, nn.Module]] = []
        self._casts: list[Tensor] = []  # of parameters; kept so that no id is reused
        self._in_optimizer_step = False  # an optimizer's step is running
        self._in_recorder = False  # ops of this recorder are running

    def place(self, model: nn.Module) -> nn.Module:
        """Return ``model`` with the plan of this run applied, and note the names of its modules.

        It is the argument with which the user's step is called.
        """
        model = self._prepare(model)
        self._models.append(model)
        self._modules |= {id(module): _plain_name(n) for n, module in model.named_modules()}
        return model

    def record(
        self, what: str, name: str, value: Tensor, where: str, is_known: bool = True
    ) -> None:
        """Record one tensor.

        Args:
            what: kind of tensor, see ``Key``.
            name: name of the op with its module, or of the parameter.
            value: the tensor.
            where: the line of the program.
            is_known: False if another run may record another tensor at this place; then the tensor
                is only counted.
        """
        self._in_recorder = True
        spec, copy, layout = _local_copy(value)
        self._in_recorder = False
        if copy is None:
            return
        number = self._counts[what, name]
        self._counts[what, name] += 1
        if is_known:
            self.seen.append(RecordedTensor(Key(what, name, number), copy, spec, where, layout))

    def record_op(self, func: Any, given: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """Record an op of the user's program: inputs, results, and later the results' gradients.

        Args:
            func: the function of torch.
            given: its positional arguments.
            kwargs: its keyword arguments.
            out: its result.
        """
        name = getattr(func, "__name__", "")
        if not self._models or name.startswith(("__", "empty", "new_empty")) or name in _UNRECORDED:
            return  # ops before the model is placed make the model and the data
        if self._in_recorder or self._in_optimizer_step or _is_called_by_library():
            return  # inside an optimizer's step tensors have any layout; parameters follow later
        if name in _CASTS:
            return self._record_cast(given, out)
        self.draws |= name in _RANDOM_OPS
        where = user_line()
        op_name = f"{name} in {self._running_modules[-1][0]}" if self._running_modules else name
        operands, is_known = _operands(name, given)
        for x in operands:
            parameter = self._parameter_name(x)
            if parameter is not None:
                self.used.setdefault(parameter, where)
            elif _is_compared(x) and out is not x:  # an in-place op has overwritten its input
                self.record("given", op_name, x, where, is_known)
        for x in out if isinstance(out, tuple | list) else (out,):
            if not _is_compared(x):
                continue
            self.record("result", op_name, x, where)
            if x.requires_grad and x.grad_fn is not None:
                x.register_hook(partial(self._record_gradient, op_name, where))
        if name in _CHOICE_OPS and isinstance(out, tuple) and out[1].ndim:
            self._in_recorder = True
            chosen_values = _values_at(
                given[0], out[1], (*given[_CHOICE_OPS[name] :], kwargs.get("dim", -1))[0]
            )
            self._in_recorder = False
            self.record("result", f"{op_name}, at its places", chosen_values, where)
            self.record("chosen", op_name, out[1], where)

    def _record_cast(self, args: tuple, out: Any) -> None:
        """Note that ``out``, a cast of a parameter, stands for the parameter from here on."""
        parameter = self._parameter_name(args[0]) if isinstance(args[0], Tensor) else None
        if parameter is not None and isinstance(out, Tensor) and out is not args[0]:
            self.used.setdefault(parameter, user_line())
            self._names[id(out)] = parameter
            self._casts.append(out)

    def _parameter_name(self, x: Tensor) -> str | None:
        """Return the name of the parameter that ``x`` is, or stands for while a module runs.

        A tensor stands for a parameter if a plan has put it in the parameter's place, or if it is a
        cast of it. "" if the name is unknown, None if ``x`` is not a parameter.
        """
        if id(x) in self._names:
            return self._names[id(x)]
        for owner in self._running_modules[-1][1].modules() if self._running_modules else ():
            for key, p in owner._parameters.items():
                if p is not None and (x is p or x is owner.__dict__.get(key)):
                    return self._names.get(id(p), "")
        return None

    def _record_gradient(self, op_name: str, where: str, gradient: Tensor | None) -> None:
        """Record the gradient of the result of an op; autograd calls this as a hook."""
        if gradient is not None:
            self.record("gradient", op_name, gradient, where)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of all models, without the parts of names that wrappers add."""
        for model in self._models:
            yield from ((_plain_name(name), p) for name, p in model.named_parameters())

    def before_step(self, *given: Any) -> None:
        """Record the gradients that an optimizer is about to use; torch calls it as a hook."""
        self._in_optimizer_step = True
        for name, p in self.parameters():
            if p.grad is not None:
                self.record("parameter gradient", name, p.grad, self.used.get(name, ""))

    def after_step(self, *given: Any) -> None:
        """Record the parameters after an optimizer's step; torch calls it as a hook."""
        self._in_optimizer_step = False
        for name, p in self.parameters():
            self.record("parameter", name, p, self.used.get(name, ""))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record everything that this thread runs inside the context."""
        hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]
        try:
            with _RecordingMode(self):
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
        numbers = [torch.tensor(x, dtype=torch.float64) for x in instances_in(returned, float)]
        for value in [*tensors_in(returned), *numbers]:
            self.record("returned", "result of the step", value, "")

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        """Note that ``module`` begins to run; a hook before each forward."""
        self._names |= {
            id(p): name for name, p in self.parameters() if not self._running_modules
        }  # read again at each call of a model, since a plan may have replaced parameters
        self._running_modules.append((self._modules.get(id(module), type(module).__name__), module))

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        """Note that the innermost module has ended; a hook after each forward."""
        with suppress(IndexError):
            self._running_modules.pop()


class _RecordingMode(TorchFunctionMode):
    """Mode that calls each function of torch and passes it to the recorder with its result."""

    def __init__(self, watch: StepRecorder) -> None:
        super().__init__()
        self._recorder = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SORTS and "stable" not in kwargs:
            # Torch leaves the order of equal numbers open, and it differs from process to process.
            kwargs |= zip(("dim", "descending"), args[1:], strict=False)
            args, kwargs = args[:1], kwargs | {"stable": True}
        out = (
            in_float64.call(func, args, kwargs) if self._recorder.double else func(*args, **kwargs)
        )
        self._recorder.record_op(func, args, kwargs, out)
        return out


def _values_at(x: Any, places: Any, dim: int) -> Tensor:
    """Return the values of ``x`` at the indices ``places`` along ``dim``, which topk or max chose.

    Where two values are nearly equal, runs may choose other indices, but the values agree.
    """
    with torch.no_grad():
        if hasattr(x, "full_tensor"):  # DTensor has no rule for take_along_dim
            x, places = x.full_tensor(), places.full_tensor()
        indices = places if places.ndim == x.ndim else places.unsqueeze(dim)
        return torch.take_along_dim(x, indices, dim)


def _operands(name: str, args: tuple) -> tuple[list[Tensor], bool]:
    """Return (tensors among the arguments of an op, whether every run has them in this order).

    For ``plain * global`` Python calls the right operand first, which swaps the operands, so their
    order differs between runs. The two are sorted by their numbers of dims; if these are equal, the
    order is unknown.
    """
    tensors = list(tensors_in(args))
    if name not in ("add", "mul") or len(tensors) != 2:
        return tensors, True
    tensors.sort(key=lambda x: -x.ndim)
    is_mixed = len({isinstance(x, GlobalTensor) for x in tensors}) == 2
    return tensors, not is_mixed or tensors[0].ndim != tensors[1].ndim


def _is_compared(x: Any) -> bool:
    return isinstance(x, Tensor) and is_rounded(x)


def is_rounded(x: Tensor) -> bool:
    """Return whether arithmetic in the dtype of ``x`` rounds: floats and complex numbers do."""
    return x.is_floating_point() or x.is_complex()


def _local_copy(value: Any) -> tuple[TensorSpec | None, Tensor | None, str]:
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
    for word in _WRAPPER_PREFIXES:
        name = f"{name}.".replace(word, "").removesuffix(".")
    return name


def _is_called_by_library() -> bool:
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
