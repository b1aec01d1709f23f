"""Search for the state of a step that lasts between its calls: a walk over all objects that the
step can reach.

```
source  a place that holds a tensor: read again before every run, so the tensor may be replaced
guard   a number, a string, a length, or the identity of an object on which the recording
        depended, and which must be unchanged
```

The walk starts from arguments that are modules or optimizers, the object of a bound method, the
variables that a function closes over, and the globals that it names. From there it goes on to
containers, modules, optimizers, scalers and objects, with the functions of the user's own classes.
"""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..autograd.coded_sums import coder_of
from ..nn.sharded.install import coders_of
from .guards import SIMPLE_TYPES, Guard, is_simple_value
from .sources import Attributes, FunctionKey, Source

MAX_OBJECTS = 200_000  # values that the walk visits
MAX_ARRAY_BYTES = 1 << 16  # of a numpy array, which is compared before each run
_LIBRARIES = ("consistent", "mirrored", "torch")
# The walk enters objects of these modules, although they belong to a library, because they keep
# tensors that programs use: a graph, its config and its optimizers; masks of flex_attention;
# distributions.
_SEARCHED_MODULES = ("consistent.step.", "torch.nn.attention.", "torch.distributions.")
_STDLIB_FOLDER = sysconfig.get_paths()["stdlib"]
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module())) - {"training"}
_Item = tuple[str, Any, Any, Any]  # path, store, key, value
_LENGTH, _MEMBERS = FunctionKey(len), FunctionKey(frozenset)
_BYTES = FunctionKey(lambda array: (array.shape, array.dtype.str, array.tobytes()))
# Without hooks, which is the usual case, the answer is always this object: guards compare identity
# first.
_NO_HOOKS: tuple[tuple[int, ...], ...] = ((),)


def _module_hooks(module: torch.nn.Module) -> tuple[tuple[int, ...], ...]:
    hook_dicts = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return tuple(map(tuple, hook_dicts)) if any(hook_dicts) else _NO_HOOKS


def _leaf_hooks(x: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    hook_dicts = x._backward_hooks or (), x._post_accumulate_grad_hooks or ()  # type: ignore[attr-defined]
    return tuple(map(tuple, hook_dicts)) if any(hook_dicts) else _NO_HOOKS


_MODULE_HOOKS, _LEAF_HOOKS = FunctionKey(_module_hooks), FunctionKey(_leaf_hooks)


@dataclass
class ReachableState:
    """State that the walk has found: where tensors are kept, and what a program depends on.

    Args:
        sources: places that hold tensors, such as ``model.weight`` and its ``.grad``.
        guards: conditions on numbers, lengths and the identity of objects.
        schedule_guards: id of a learning rate schedule -> its guards, which apply only if the step
            reads the schedule.
        optimizer_guards: id of an optimizer -> guards on the numbers of its param groups. A guard
            on a learning rate applies only if the step reads the rate. The others also apply if the
            optimizer is recorded, because an optimizer that runs as written reads them again.
        refusals: reasons, with paths, why some objects cannot be compared; if there are any, the
            step cannot be a program.
    """

    sources: list[Source] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedules: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    schedule_guards: dict[int, list[Guard]] = field(default_factory=dict)
    optimizer_guards: dict[int, list[Guard]] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)


def find_reachable_state(step: Callable[..., Any], given: Any) -> ReachableState:
    """Return the state that ``step`` can reach when it is called with the arguments ``given``."""
    walk = _Walk()
    walk.arguments(given)
    walk.visit(step, "step", None, None)
    walk.gradients()
    return walk.reached


class _Walk:
    """The walk over all objects that a step can reach; ``reached`` collects what it finds."""

    def __init__(self) -> None:
        self.reached = ReachableState()
        self._seen: set[int] = set()
        self._kept_alive: list[Any] = []
        self._leaves: dict[int, tuple[Any, str]] = {}
        self._count = 0

    def visit(self, value: Any, path: str, store: Any, key: Any) -> None:
        """Add ``value`` to what was found, and then everything inside it.

        Args:
            path: name in messages, such as ``model.0.bias``.
            store, key: the container and key where the value was found, of which a guard or source
                is made. With None, the value is only walked through.
        """
        self._count += 1
        if self._count > MAX_OBJECTS:
            if self._count == MAX_OBJECTS + 1:
                self.reached.refusals.append(
                    f"more than {MAX_OBJECTS} values can be reached, the last at {path}"
                )
            return
        if isinstance(value, torch.Tensor):
            self._visit_tensor(value, path, store, key)
            return
        if store is not None:
            self.reached.guards.append(Guard(store, key, path, value))
        if (
            isinstance(value, SIMPLE_TYPES)
            or type(value).__module__ == "builtins"
            and callable(value)
        ):
            if not isinstance(value, type | types.FunctionType | types.MethodType):
                return
        if id(value) in self._seen:
            return
        # The value is kept alive below, so that its id stays valid during the walk.
        self._seen.add(id(value))
        self._kept_alive.append(value)
        for name, item_store, item_key, x in self._contents(value, path):
            if type(item_key) is FunctionKey:
                self.reached.guards.append(Guard(item_store, item_key, name, x))
            else:
                self.visit(x, name, item_store, item_key)

    def arguments(self, value: Any) -> None:
        """Visit the modules, optimizers and other objects among the arguments.

        Tensors and numbers are passed again in each call, so they need no guard.
        """
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | tuple):
            for x in value:
                self.arguments(x)
        elif isinstance(value, torch.Tensor):
            self._add_leaf(value, "argument")
        elif not isinstance(value, SIMPLE_TYPES):
            self.visit(value, "argument", None, None)

    def _visit_tensor(self, x: torch.Tensor, path: str, store: Any, key: Any) -> None:
        if store is not None and id(x) in self._seen:  # the tensor is also in another source
            self.reached.guards.append(Guard(store, key, path, x))
        elif store is not None:
            self._seen.add(id(x))
            self._kept_alive.append(x)
            self.reached.sources.append(Source(store, key, path))
        self._add_leaf(x, path)

    # -- what is in a value ------------------------------------------------------------------------

    def _contents(self, value: Any, path: str) -> Iterator[_Item]:
        """Yield the objects inside ``value`` as (path, store, key, object).

        Nothing is yielded if the walk does not enter the value, such as an object of a library.
        """
        if isinstance(value, torch.nn.Module):
            return self._module_contents(value, path)
        if isinstance(value, torch.optim.Optimizer):
            self.reached.optimizers.append(value)
            return self._optimizer_contents(value, path)
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            return self._schedule_contents(value, path)
        if isinstance(value, torch.amp.GradScaler):
            self.reached.scalers.append(value)
            simple = (*SIMPLE_TYPES, torch.Tensor)
            attributes = vars(value)
            return (
                (f"{path}.{n}", attributes, n, x)
                for n, x in attributes.items()
                if isinstance(x, simple)
            )
        if isinstance(value, list | tuple | deque):
            return self._list_contents(value, path)
        if isinstance(value, dict):
            return self._dict_contents(value, path, "")
        if isinstance(value, set | frozenset):
            return iter([(path, value, _MEMBERS, frozenset(value))])
        if isinstance(value, types.MethodType):
            return iter([(path, None, None, value.__self__), (path, None, None, value.__func__)])
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return iter([(path, None, None, x) for x in parts])
        if isinstance(value, types.FunctionType):
            return self._function_contents(value, path)
        if isinstance(value, type):
            return self._class_contents(value, path)
        if isinstance(value, types.ModuleType):
            return iter(())
        return self._object_contents(value, path)

    def _object_contents(self, value: Any, path: str) -> Iterator[_Item]:
        module_name = type(value).__module__
        if module_name == "numpy":
            return self._array_contents(value, path)
        if isinstance(value, Iterator):
            self.reached.refusals.append(f"{path} is an iterator, which each call may advance")
            return iter(())
        is_searched = module_name.startswith(_SEARCHED_MODULES) or isinstance(
            value, types.SimpleNamespace
        )
        if not is_searched and (
            module_name.partition(".")[0] in _LIBRARIES or _is_standard(module_name)
        ):
            return iter(())
        return self._attribute_contents(value, path)

    def _attribute_contents(self, value: Any, path: str) -> Iterator[_Item]:
        if hasattr(value, "__dict__"):
            yield from self._dict_contents(vars(value), path, ".")
        for cls in type(value).__mro__:
            names = vars(cls).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                    yield f"{path}.{name}", Attributes(value), name, getattr(value, name)
        for cls in type(value).__mro__:
            yield path, None, None, cls

    def _array_contents(self, value: Any, path: str) -> Iterator[_Item]:
        if getattr(value, "nbytes", 0) > MAX_ARRAY_BYTES or getattr(
            value.dtype, "hasobject", False
        ):
            self.reached.refusals.append(f"{path} is a large array of numpy; make it a tensor")
        else:
            yield path, value, _BYTES, _BYTES.function(value)

    def _module_contents(self, module: torch.nn.Module, path: str) -> Iterator[_Item]:
        yield path, module, _MODULE_HOOKS, _MODULE_HOOKS.function(module)
        for store in (module._parameters, module._buffers, module._modules):
            yield path, store, _LENGTH, len(store)
            for name, x in store.items():
                yield f"{path}.{name}", store, name, x
        attributes = vars(module)
        yield path, attributes, _LENGTH, len(attributes)
        for name, x in list(attributes.items()):
            if name not in _MODULE_ATTRIBUTES and not name.startswith("_consistent"):
                yield f"{path}.{name}", attributes, name, x
        sum_coders = [coder_of(p) for p in module._parameters.values() if p is not None]
        for coder in filter(None, [*coders_of(module), *sum_coders]):
            for name, x in vars(coder).items():
                if isinstance(x, torch.Tensor):
                    yield f"{path}, {name} by its codecs", vars(coder), name, x
        for cls in type(module).__mro__:
            yield path, None, None, cls

    def _optimizer_contents(self, optimizer: Any, path: str) -> Iterator[_Item]:
        attributes, groups, state = vars(optimizer), optimizer.param_groups, optimizer.state
        for name in ("param_groups", "state"):
            # Sources below are read through these containers, which must stay the same objects.
            self.reached.guards.append(Guard(attributes, name, f"{path}.{name}", attributes[name]))
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            yield f"{path}.{name}", attributes[name], _LENGTH, len(attributes[name])
        yield f"{path}.param_groups", groups, _LENGTH, len(groups)
        group_guards = self.reached.optimizer_guards.setdefault(id(optimizer), [])
        for i, group in enumerate(groups):
            self.reached.guards.append(Guard(groups, i, f"{path}.param_groups[{i}]", group))
            for name, x in group.items():
                item_path = f"{path}.param_groups[{i}][{name!r}]"
                if not is_simple_value(x):
                    yield item_path, group, name, x
                else:
                    group_guards.append(Guard(group, name, item_path, x))
        yield f"{path}.state", state, _LENGTH, len(state)
        for i, (param, param_state) in enumerate(list(state.items())):
            yield f"{path}.state of parameter {i}", state, param, param_state

    def _schedule_contents(self, schedule: Any, path: str) -> Iterator[_Item]:
        self.reached.schedules.append(schedule)
        attributes = vars(schedule)
        self.reached.schedule_guards[id(schedule)] = [
            Guard(store, key, f"{path}.{name}", x)
            for name, value in attributes.items()
            for store, key, x in (
                [(value, i, item) for i, item in enumerate(value)]
                if isinstance(value, list)
                else [(attributes, name, value)]
            )
            if isinstance(x, SIMPLE_TYPES)
        ]
        yield path, None, None, getattr(schedule, "optimizer", None)

    def _list_contents(self, value: Any, path: str) -> Iterator[_Item]:
        yield path, value, _LENGTH, len(value)
        for i, x in enumerate(value):
            yield f"{path}[{i}]", value, i, x

    def _dict_contents(self, value: Any, path: str, dot: str) -> Iterator[_Item]:
        yield path, value, _LENGTH, len(value)
        for name, x in list(value.items()):
            item_path = f"{path}.{name}" if dot else f"{path}[{name!r}]"
            yield item_path, value, name, x

    # -- code --------------------------------------------------------------------------------------

    def _class_contents(self, cls: type, path: str) -> Iterator[_Item]:
        """Yield the attributes and functions of a class that the user has written.

        For a class of an installed library, nothing is yielded.
        """
        if _is_installed(cls.__module__):
            return
        for name, x in list(vars(cls).items()):
            if isinstance(x, staticmethod | classmethod):
                x = x.__func__
            if isinstance(x, types.FunctionType):
                yield f"{path}.{name}", None, None, x
            elif isinstance(x, property):
                for accessor in (x.fget, x.fset):
                    yield f"{path}.{name}", None, None, accessor
            elif not name.startswith("__"):
                yield f"{path}.{name}", Attributes(cls), name, getattr(cls, name, x)

    def _function_contents(self, function: types.FunctionType, path: str) -> Iterator[_Item]:
        """Yield what a function that the user has written can reach; nothing for library functions.

        That is: the variables that it closes over, the globals that it names, and its defaults.
        """
        if _is_installed(function.__module__ or ""):
            return
        code, cells = function.__code__, function.__closure__ or ()
        names, attributes = _names_in_code(code)
        for name, cell in zip(code.co_freevars, cells, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not set yet
                continue
            yield name, cell, None, value
            yield from _module_attributes(name, value, attributes)
        for name in ("__defaults__", "__kwdefaults__"):
            yield f"{path}, defaults", Attributes(function), name, getattr(function, name)
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            yield name, function.__globals__, name, value
            yield from _module_attributes(name, value, attributes)

    # -- leaves ------------------------------------------------------------------------------------

    def _add_leaf(self, x: torch.Tensor, path: str) -> None:
        if x.requires_grad and x.is_leaf and id(x) not in self._leaves:
            self._leaves[id(x)] = x, path
            self.reached.guards.append(
                Guard(x, _LEAF_HOOKS, f"{path}, hooks", _LEAF_HOOKS.function(x))
            )

    def gradients(self) -> None:
        """Add ``x.grad`` as a source for each leaf ``x`` that was found, after the walk."""
        for x, path in self._leaves.values():
            self.reached.sources.append(Source(x, "grad", f"{path}.grad"))


def _module_attributes(name: str, value: Any, attributes: set[str]) -> Iterator[_Item]:
    """Yield the attributes of ``value`` named in ``attributes``, if it is a module of the user.

    So ``config.rate`` in a step is found, where ``config`` is an imported Python file.
    """
    if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
        namespace = vars(value)
        for attribute in sorted(attributes & namespace.keys()):
            yield f"{name}.{attribute}", namespace, attribute, namespace[attribute]


@functools.cache
def _is_standard(module: str) -> bool:
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None) or ""
    return module == "builtins" or (file.startswith(_STDLIB_FOLDER) and "site-packages" not in file)


def _is_installed(module: str) -> bool:
    """Return whether the Python module ``module`` belongs to an installed library.

    The walk enters the user's own classes and functions only.
    """
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    is_known_library = top in _LIBRARIES or top in sys.builtin_module_names
    return (
        is_known_library
        or _is_standard(module)
        or "site-packages" in file
        or "dist-packages" in file
    )


def _names_in_code(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return (global names, attribute names) that ``code`` and the functions inside it use.

    The walk follows only these, not all globals of a file. Attributes matter for
    ``module.attribute``.
    """
    names, attributes = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
            names.add(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
            attributes.add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            inner_names = _names_in_code(inner)
            names |= inner_names[0]
            attributes |= inner_names[1]
    return names, attributes
