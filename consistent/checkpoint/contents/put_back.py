"""Loading of a checkpoint into objects: choose the tensors to read into, then update the objects.

Names, shapes and dtypes of all objects are checked before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...dispatch.plans.shards import is_global
from ...spec import B, NdSbp, Placement, TensorSpec
from ...spec.nearest import suggestion
from ...tensor.making.create import distribute
from ...tensor.making.factories import empty
from ...tensor.storage.step_layout import OwnedState, step_spec
from ..values import encode
from . import parameters
from .collect import Contents, kind_of, state_of
from .stored import Stored, TensorName

OPTIONS = ("strict", "cast", "random")  # of load, suggested for mistyped names


class Loading:
    """One load of a checkpoint into objects, in three steps.

    The constructor checks that the checkpoint fits the objects, and chooses the tensors to read
    into, ``targets``. Then the caller reads these from the files. Then ``put_back`` updates the
    objects.

    Args:
        stored: the checkpoint.
        objects: the objects to read into, by name.
        strict, cast: as in ``load``.

    Raises:
        ValueError: the checkpoint does not fit; the message lists everything that does not.
    """

    def __init__(self, stored: Stored, objects: dict[str, Any], strict: bool, cast: bool) -> None:
        self._stored, self._objects = stored, objects
        self._strict, self._cast = strict, cast
        self._names = parameters.names_in(objects)
        self._faults: list[str] = []
        self.targets: dict[str, torch.Tensor] = {}
        """Name in the checkpoint -> plain or global tensor to read into."""
        self._made: dict[str, torch.Tensor] = {}  # name in a value -> tensor
        # Names in ``_made`` of plain tensors that become B on this placement after reading.
        self._to_spread: dict[str, Placement] = {}
        # (tensor whose shard is not one box, tensor that is read in its place)
        self._cut: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._modules: dict[str, dict[str, Any]] = {}
        for name, given in objects.items():
            self._enter(name, given)
        for name in self._others():
            self._enter_value(name, {})
        if self._faults:
            raise ValueError("it does not fit.\n" + "\n".join(f"    {f}" for f in self._faults))

    def _enter(self, name: str, given: Any) -> None:
        kind = kind_of(given)
        if kind == "module":
            self._enter_module(name, given)
        elif name not in self._stored.index.values:
            has = ", ".join(self._stored.names) or "nothing"
            near = suggestion(name, (*self._stored.names, *OPTIONS))
            self._faults.append(f"{name}: the checkpoint has none; it has {has}.{near}")
        elif kind == "optimizer":
            self._attempt(name, lambda: self._enter_optimizer(name, given))
        else:
            current = Contents()
            encode(state_of(name, given, self._objects), (name,), current.enter)
            self._attempt(name, lambda: self._enter_value(name, current.by_any_name()))

    def _attempt(self, name: str, step: Any) -> None:
        try:
            step()
        except ValueError as error:
            self._faults.append(str(error))
        except (KeyError, TypeError, AttributeError) as error:
            self._faults.append(f"{name}: what is stored is not its state ({error!r})")

    def _others(self) -> list[str]:
        """Return the names of stored values for which the caller of ``load`` gave no object.

        ``load`` returns these values.
        """
        index = self._stored.index
        return [n for n, k in index.kinds.items() if k == "value" and n not in self._objects]

    # -- modules -----------------------------------------------------------------------------------

    def _enter_module(self, name: str, module: torch.nn.Module) -> None:
        state = dict(module.state_dict(keep_vars=True))
        wanted = {k: x for k, x in state.items() if isinstance(x, torch.Tensor)}
        prefix, there = self._part_of(name, list(wanted))
        if self._strict:
            # A tied tensor is not missing if the checkpoint has it under any of its names.
            read = {id(wanted[k]) for k in wanted if k in there}
            missing = [k for k, x in wanted.items() if k not in there and id(x) not in read]
            extra = [k for k in there if k not in wanted]
            self._faults += [f"{name}: the checkpoint lacks {k}" for k in missing]
            self._faults += [f"{name}: only the checkpoint has {k}" for k in extra]
        for k, x in wanted.items():
            if k in there:
                self._add(f"{name}.{k}", prefix + k, x.detach())
        self._modules[name] = {k: self._other_state(name, prefix, k, x) for k, x in state.items()}

    def _part_of(self, name: str, wanted: list[str]) -> tuple[str, set[str]]:
        """Find the tensors of the module ``name`` in the checkpoint: (prefix, names after it).

        Usually their names begin with ``f"{name}."``. A checkpoint of only one module may lack this
        prefix. So if more of the module's names ``wanted`` are found without it, the result is
        ("", all names).
        """
        stored, index = self._stored, self._stored.index
        prefix = f"{name}."
        own = {key.removeprefix(prefix) for key in stored.tensors if key.startswith(prefix)}
        if name in index.kinds:
            return prefix, own & set(map(str, stored.value(name)))
        every = set(stored.tensors)
        matches = len(own & set(wanted)), len(every & set(wanted))
        return ("", every) if matches[1] > matches[0] or not own else (prefix, own)

    def _other_state(self, name: str, prefix: str, key: str, now: Any) -> Any:
        """Return what to pass to the module's ``load_state_dict`` for the entry ``key``.

        ``now`` is the entry in the module's present state dict. A tensor is passed as it is, since
        it is read in place. For any other entry it is the stored value, or ``now`` if none is
        stored. ``prefix`` is that of ``_part_of``.
        """
        if isinstance(now, torch.Tensor) or not prefix or name not in self._stored.index.values:
            return now.detach() if isinstance(now, torch.Tensor) else now
        return self._stored.value(name).get(key, now)

    # -- optimizers --------------------------------------------------------------------------------

    def _enter_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        saved = self._stored.value(name)
        numbered = parameters.numbered_state(name, saved, optimizer, self._names)
        states = numbered["state"]
        for k, p in enumerate(parameters.parameters_of(optimizer)):
            own = optimizer.state.get(p, {})
            own = {} if isinstance(own, OwnedState) else own  # state of the owning rank only
            for inner, held in _beside(states.pop(k, {}), own):
                self._enter_state(inner, p, held)
        now: Any = {**optimizer.state_dict(), "state": dict(optimizer.state)}
        for inner, held in _beside(numbered, now):
            self._enter_setting(inner, held)

    def _enter_state(self, name: str, p: Any, held: Any) -> None:
        """Choose the tensor to read into for the optimizer state ``name`` of parameter ``p``.

        It has the layout of ``held``, the optimizer's present state tensor, if that has the stored
        shape. Otherwise it has the layout in which the optimizer would create such a tensor.
        """
        key = self._stored.key(name)
        shape, dtype = self._stored.shape(key), self._stored.dtype(key)
        if isinstance(held, torch.Tensor) and held.shape == shape:
            self._add(name, key, like(held.detach(), dtype))
        elif p.shape == shape and shape:
            self._add(
                name, key, like(p.detach(), dtype, step_spec(p).sbp if is_global(p) else None)
            )
        else:
            self._add(name, key, torch.empty(shape, dtype=dtype))
            if shape and is_global(p):
                self._to_spread[name] = p.placement

    def _enter_setting(self, name: TensorName, held: Any) -> None:
        """Choose the tensor to read into for an optimizer's setting, such as a learning rate.

        It has the layout of ``held``, the optimizer's present tensor, if that has the stored
        shape. Otherwise it is a plain tensor.
        """
        key = self._stored.key(name)
        shape, dtype = self._stored.shape(key), self._stored.dtype(key)
        fits = isinstance(held, torch.Tensor) and held.shape == shape
        target = like(held.detach(), dtype) if fits else torch.empty(shape, dtype=dtype)
        self._add(name, key, target)

    # -- everything else ---------------------------------------------------------------------------

    def _enter_value(self, name: str, now: dict[str, torch.Tensor]) -> None:
        """Choose the tensors to read into for the tensors in the stored value ``name``.

        ``now`` has the object's present tensors, by name, which are read into in place. An object
        with ``load_state_dict`` gets new tensors of the same layouts instead. A name that is not in
        ``now`` gets a new plain tensor.
        """
        takes_state = kind_of(self._objects.get(name)) == "state"
        for inner in self._stored.tensor_names(name):
            key, held = self._stored.key(inner), now.get(inner)
            shape, dtype = self._stored.shape(key), self._stored.dtype(key)
            if held is None or (takes_state and held.shape != shape):
                self._add(inner, key, torch.empty(shape, dtype=dtype))
            else:
                self._add(inner, key, like(held.detach(), dtype) if takes_state else held.detach())

    # -- targets -----------------------------------------------------------------------------------

    def _add(self, shown: str, key: str, target: Any) -> None:
        """Register ``target`` to be read from the stored ``key``, or record why it does not fit.

        ``shown`` is the name of the tensor in errors and in the value that contains it.
        """
        shape, dtype = self._stored.shape(key), self._stored.dtype(key)
        if target.shape != shape:
            self._faults.append(
                f"{shown} has shape {tuple(target.shape)}, and in the checkpoint {tuple(shape)}"
            )
        elif target.dtype != dtype and not self._cast:
            self._faults.append(
                f"{shown} is {target.dtype}, and in the checkpoint {dtype}; cast=True converts it"
            )
        elif target.is_meta and not is_global(target):
            self._faults.append(f"{shown} is on meta: make it on a device first")
        else:
            self.targets[key] = self._made[shown] = target
            if is_global(target) and target._spec.layout.is_cut:
                self.targets[key] = like(target, target.dtype)
                self._cut.append((target, self.targets[key]))

    # -- after reading -----------------------------------------------------------------------------

    def put_back(self) -> dict[str, Any]:
        """Update the objects with what was read into ``targets``.

        Returns the stored values for which the caller gave no object, by name.
        """
        for target, read in self._cut:
            with torch.no_grad():
                target.copy_(read)
        for name, placement in self._to_spread.items():
            self._made[name] = distribute(self._made[name], placement, (B,) * placement.ndim)
        for name, state in self._modules.items():
            if not _is_in_place(self._objects[name], state):
                # Missing and extra names were checked before, unless the caller allowed them.
                self._objects[name].load_state_dict(state, strict=False)
        found = {}
        for name in [*self._objects, *self._others()]:
            given: Any = self._objects.get(name)
            kind = kind_of(given)
            if kind != "module":
                value = self._stored.value(name, self._made)
                if kind == "optimizer":
                    value = parameters.numbered_state(name, value, given, self._names)
                if kind == "value":
                    found[name] = value
                elif name != "random":
                    given.load_state_dict(value)
        if "random" in self._objects:  # last, because load_state_dict of others may draw numbers
            self._objects["random"].load_state_dict(self._stored.value("random", self._made))
        return found


def like(x: Any, dtype: torch.dtype, sbp: NdSbp | None = None) -> torch.Tensor:
    """Return an empty tensor with the shape and layout of ``x``, to read a stored tensor into.

    ``sbp``, if given, replaces the SBP of ``x``. Reading requires that each rank's shard is one box
    of the tensor, so cuts such as ``S(0, cut="zigzag")`` become the plain ``S(0)``.
    """
    if not is_global(x):
        return torch.empty_like(x, dtype=dtype)
    layout = TensorSpec.of(x.placement, sbp or x.sbp, x.shape, dtype).settled.plain
    return empty(x.shape, placement=x.placement, sbp=layout.sbp, dtype=dtype)


def _beside(stored: Any, held: Any) -> Iterator[tuple[TensorName, Any]]:
    """Yield (tensor name, what the object has there) for each tensor in a stored value.

    ``stored`` and ``held`` are nested dicts and lists that are traversed together. Where ``held``
    has no such key or index the second item is None.
    """
    if isinstance(stored, TensorName):
        yield stored, held
    elif isinstance(stored, list | tuple):
        there = held if isinstance(held, list | tuple) else ()
        for k, each in enumerate(stored):
            yield from _beside(each, there[k] if k < len(there) else None)
    elif isinstance(stored, dict):
        there = held if isinstance(held, dict) else {}
        for key, each in stored.items():
            yield from _beside(each, there.get(key))


def _is_in_place(module: torch.nn.Module, state: dict[str, Any]) -> bool:
    """Return whether all entries of ``state`` are the module's own parameters and buffers.

    These were read in place, so ``load_state_dict`` need not be called.
    """
    held = module.state_dict(keep_vars=True)
    tensors = [*module.parameters(), *module.buffers()]
    own = {id(x) for x in tensors}
    return all(id(held[k]) in own for k in state)
