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
    into, ``targets``. Then the caller reads these from the files. Then ``update_objects`` updates
    the objects.

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
        self._tensors: dict[str, torch.Tensor] = {}  # name in a value -> tensor
        # Name in ``_tensors`` of a plain tensor -> placement on which it becomes B after reading.
        self._broadcast_placements: dict[str, Placement] = {}
        # (tensor whose shard is not one box, tensor that is read in its place)
        self._substitutes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._modules: dict[str, dict[str, Any]] = {}
        for name, obj in objects.items():
            self._choose_targets(name, obj)
        for name in self._names_without_object():
            self._choose_value_targets(name, {})
        if self._faults:
            raise ValueError("it does not fit.\n" + "\n".join(f"    {f}" for f in self._faults))

    def _choose_targets(self, name: str, obj: Any) -> None:
        kind = kind_of(obj)
        if kind == "module":
            self._choose_module_targets(name, obj)
        elif name not in self._stored.index.values:
            stored_names = ", ".join(self._stored.names) or "nothing"
            hint = suggestion(name, (*self._stored.names, *OPTIONS))
            self._faults.append(f"{name}: the checkpoint has none; it has {stored_names}.{hint}")
        elif kind == "optimizer":
            self._note_faults(name, lambda: self._choose_optimizer_targets(name, obj))
        else:
            current = Contents()
            encode(state_of(name, obj, self._objects), (name,), current.add)
            self._note_faults(name, lambda: self._choose_value_targets(name, current.by_any_name()))

    def _note_faults(self, name: str, step: Any) -> None:
        try:
            step()
        except ValueError as error:
            self._faults.append(str(error))
        except (KeyError, TypeError, AttributeError) as error:
            self._faults.append(f"{name}: what is stored is not its state ({error!r})")

    def _names_without_object(self) -> list[str]:
        """Return the names of stored values for which the caller of ``load`` gave no object.

        ``load`` returns these values.
        """
        index = self._stored.index
        return [n for n, k in index.kinds.items() if k == "value" and n not in self._objects]

    # -- modules -----------------------------------------------------------------------------------

    def _choose_module_targets(self, name: str, module: torch.nn.Module) -> None:
        state = dict(module.state_dict(keep_vars=True))
        tensors = {k: x for k, x in state.items() if isinstance(x, torch.Tensor)}
        prefix, stored = self._prefix_and_names(name, list(tensors))
        if self._strict:
            # A tied tensor is not missing if the checkpoint has it under any of its names.
            read_ids = {id(tensors[k]) for k in tensors if k in stored}
            missing = [k for k, x in tensors.items() if k not in stored and id(x) not in read_ids]
            extra = [k for k in stored if k not in tensors]
            self._faults += [f"{name}: the checkpoint lacks {k}" for k in missing]
            self._faults += [f"{name}: only the checkpoint has {k}" for k in extra]
        for k, x in tensors.items():
            if k in stored:
                self._add_target(f"{name}.{k}", prefix + k, x.detach())
        self._modules[name] = {k: self._entry_to_load(name, prefix, k, x) for k, x in state.items()}

    def _prefix_and_names(self, name: str, tensor_names: list[str]) -> tuple[str, set[str]]:
        """Find the tensors of the module ``name`` in the checkpoint: (prefix, names after it).

        Usually their names begin with ``f"{name}."``. A checkpoint of only one module may lack this
        prefix. So if more of the module's ``tensor_names`` are found without it, the result is
        ("", all names).
        """
        stored, index = self._stored, self._stored.index
        prefix = f"{name}."
        own_names = {key.removeprefix(prefix) for key in stored.tensors if key.startswith(prefix)}
        if name in index.kinds:
            return prefix, own_names & set(map(str, stored.value(name)))
        all_names = set(stored.tensors)
        matches = len(own_names & set(tensor_names)), len(all_names & set(tensor_names))
        return ("", all_names) if matches[1] > matches[0] or not own_names else (prefix, own_names)

    def _entry_to_load(self, name: str, prefix: str, key: str, present: Any) -> Any:
        """Return what to pass to the module's ``load_state_dict`` for the entry ``key``.

        ``present`` is the entry in the module's present state dict. A tensor is passed as it is,
        since it is read in place. For any other entry it is the stored value, or ``present`` if
        none is stored. ``prefix`` is that of ``_prefix_and_names``.
        """
        if isinstance(present, torch.Tensor) or not prefix or name not in self._stored.index.values:
            return present.detach() if isinstance(present, torch.Tensor) else present
        return self._stored.value(name).get(key, present)

    # -- optimizers --------------------------------------------------------------------------------

    def _choose_optimizer_targets(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        saved = self._stored.value(name)
        numbered = parameters.numbered_state(name, saved, optimizer, self._names)
        states = numbered["state"]
        for k, p in enumerate(parameters.parameters_of(optimizer)):
            state = optimizer.state.get(p, {})
            state = {} if isinstance(state, OwnedState) else state  # state of the owning rank only
            for tensor_name, present in _pair_tensors(states.pop(k, {}), state):
                self._choose_state_target(tensor_name, p, present)
        present_state: Any = {**optimizer.state_dict(), "state": dict(optimizer.state)}
        for tensor_name, present in _pair_tensors(numbered, present_state):
            self._choose_setting_target(tensor_name, present)

    def _choose_state_target(self, name: str, p: Any, present: Any) -> None:
        """Choose the tensor to read into for the optimizer state ``name`` of parameter ``p``.

        It has the layout of ``present``, the optimizer's present state tensor, if that has the
        stored shape. Otherwise it has the layout in which the optimizer would create such a tensor.
        """
        key = self._stored.key(name)
        shape, dtype = self._stored.shape(key), self._stored.dtype(key)
        if isinstance(present, torch.Tensor) and present.shape == shape:
            self._add_target(name, key, empty_like(present.detach(), dtype))
        elif p.shape == shape and shape:
            self._add_target(
                name, key, empty_like(p.detach(), dtype, step_spec(p).sbp if is_global(p) else None)
            )
        else:
            self._add_target(name, key, torch.empty(shape, dtype=dtype))
            if shape and is_global(p):
                self._broadcast_placements[name] = p.placement

    def _choose_setting_target(self, name: TensorName, present: Any) -> None:
        """Choose the tensor to read into for an optimizer's setting, such as a learning rate.

        It has the layout of ``present``, the optimizer's present tensor, if that has the stored
        shape. Otherwise it is a plain tensor.
        """
        key = self._stored.key(name)
        shape, dtype = self._stored.shape(key), self._stored.dtype(key)
        fits = isinstance(present, torch.Tensor) and present.shape == shape
        target = empty_like(present.detach(), dtype) if fits else torch.empty(shape, dtype=dtype)
        self._add_target(name, key, target)

    # -- everything else ---------------------------------------------------------------------------

    def _choose_value_targets(self, name: str, present: dict[str, torch.Tensor]) -> None:
        """Choose the tensors to read into for the tensors in the stored value ``name``.

        ``present`` has the object's present tensors, by name, which are overwritten in place. An
        object with ``load_state_dict`` gets new tensors of the same layouts instead. A name that is
        not in ``present`` gets a new plain tensor.
        """
        takes_state = kind_of(self._objects.get(name)) == "state"
        for tensor_name in self._stored.tensor_names(name):
            key, x = self._stored.key(tensor_name), present.get(tensor_name)
            shape, dtype = self._stored.shape(key), self._stored.dtype(key)
            if x is None or (takes_state and x.shape != shape):
                self._add_target(tensor_name, key, torch.empty(shape, dtype=dtype))
            else:
                self._add_target(
                    tensor_name, key, empty_like(x.detach(), dtype) if takes_state else x.detach()
                )

    # -- targets -----------------------------------------------------------------------------------

    def _add_target(self, name: str, key: str, target: Any) -> None:
        """Register ``target`` to be read from the stored ``key``, or record why it does not fit.

        ``name`` is the name of the tensor in errors and in the value that contains it.
        """
        shape, dtype = self._stored.shape(key), self._stored.dtype(key)
        if target.shape != shape:
            self._faults.append(
                f"{name} has shape {tuple(target.shape)}, and in the checkpoint {tuple(shape)}"
            )
        elif target.dtype != dtype and not self._cast:
            self._faults.append(
                f"{name} is {target.dtype}, and in the checkpoint {dtype}; cast=True converts it"
            )
        elif target.is_meta and not is_global(target):
            self._faults.append(f"{name} is on meta: make it on a device first")
        else:
            self.targets[key] = self._tensors[name] = target
            if is_global(target) and target._spec.layout.is_cut:
                self.targets[key] = empty_like(target, target.dtype)
                self._substitutes.append((target, self.targets[key]))

    # -- after reading -----------------------------------------------------------------------------

    def update_objects(self) -> dict[str, Any]:
        """Update the objects with what was read into ``targets``.

        Returns the stored values for which the caller gave no object, by name.
        """
        for target, substitute in self._substitutes:
            with torch.no_grad():
                target.copy_(substitute)
        for name, placement in self._broadcast_placements.items():
            self._tensors[name] = distribute(self._tensors[name], placement, (B,) * placement.ndim)
        for name, state in self._modules.items():
            if not _is_in_place(self._objects[name], state):
                # Missing and extra names were checked before, unless the caller allowed them.
                self._objects[name].load_state_dict(state, strict=False)
        values = {}
        for name in [*self._objects, *self._names_without_object()]:
            obj: Any = self._objects.get(name)
            kind = kind_of(obj)
            if kind != "module":
                value = self._stored.value(name, self._tensors)
                if kind == "optimizer":
                    value = parameters.numbered_state(name, value, obj, self._names)
                if kind == "value":
                    values[name] = value
                elif name != "random":
                    obj.load_state_dict(value)
        if "random" in self._objects:  # last, because load_state_dict of others may draw numbers
            self._objects["random"].load_state_dict(self._stored.value("random", self._tensors))
        return values


def empty_like(x: Any, dtype: torch.dtype, sbp: NdSbp | None = None) -> torch.Tensor:
    """Return an empty tensor with the shape and layout of ``x``, to read a stored tensor into.

    ``sbp``, if given, replaces the SBP of ``x``. Reading requires that each rank's shard is one box
    of the tensor, so cuts such as ``S(0, cut="zigzag")`` become the plain ``S(0)``.
    """
    if not is_global(x):
        return torch.empty_like(x, dtype=dtype)
    layout = TensorSpec.of(x.placement, sbp or x.sbp, x.shape, dtype).settled.plain
    return empty(x.shape, placement=x.placement, sbp=layout.sbp, dtype=dtype)


def _pair_tensors(stored: Any, present: Any) -> Iterator[tuple[TensorName, Any]]:
    """Yield (tensor name, what the object has there) for each tensor in a stored value.

    ``stored`` and ``present`` are nested dicts and lists that are traversed together. Where
    ``present`` has no such key or index the second item is None.
    """
    if isinstance(stored, TensorName):
        yield stored, present
    elif isinstance(stored, list | tuple):
        counterpart = present if isinstance(present, list | tuple) else ()
        for k, item in enumerate(stored):
            yield from _pair_tensors(item, counterpart[k] if k < len(counterpart) else None)
    elif isinstance(stored, dict):
        counterpart = present if isinstance(present, dict) else {}
        for key, item in stored.items():
            yield from _pair_tensors(item, counterpart.get(key))


def _is_in_place(module: torch.nn.Module, state: dict[str, Any]) -> bool:
    """Return whether all entries of ``state`` are the module's own parameters and buffers.

    These were read in place, so ``load_state_dict`` need not be called.
    """
    state_dict = module.state_dict(keep_vars=True)
    tensors = [*module.parameters(), *module.buffers()]
    own_ids = {id(x) for x in tensors}
    return all(id(state_dict[k]) in own_ids for k in state)
