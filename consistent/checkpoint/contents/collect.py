"""Collect what a checkpoint stores of each object: tensors by name, and all other values as JSON.

```
save(folder, model=model, optimizer=optimizer, step=120)

model.fc.weight                         tensor        values:  model      {"fc.weight": {"$tensor": "model.fc.weight"}, ...}
optimizer.state.fc.weight.exp_avg       tensor                 optimizer  {"state": {"fc.weight": {...}}, "param_groups": [...]}
                                                               step       120
```
"""  # noqa: E501

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...dispatch.plans.shards import is_global
from ..files.pieces import bytes_of
from ..values import KeyPath, encode
from . import parameters


@dataclass
class Contents:
    """What one ``save`` stores of its objects: ``collect`` fills it, and the writer reads it.

    Args:
        tensors: name -> tensor, global or plain.
        values: name given to ``save`` -> JSON text.
        kinds: name given to ``save`` -> "module", "optimizer", "state" (an object with a
            ``state_dict``) or "value".
        aliases: further name of a tensor that occurs several times -> its name in ``tensors``.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)  # id -> name: one object has one name

    def add(self, x: torch.Tensor, path: KeyPath) -> str:
        """Add the tensor ``x`` found under the keys ``path``; return its name.

        The name is the keys joined by ".": ``("model", "fc.weight") -> "model.fc.weight"``. If the
        same tensor was added before, the new name becomes an alias of the old one.

        Raises:
            ValueError: the name is taken, or the tensor cannot be written.
        """
        name = ".".join(path)
        if name in self.tensors or name in self.aliases:
            raise ValueError(
                f"two tensors would both be {name!r} in the file. Rename one of the keys that "
                "lead to them."
            )
        _check_is_storable(x, name)
        if id(x) in self._names:
            self.aliases[name] = self._names[id(x)]
        else:
            self._names[id(x)] = name
            self.tensors[name] = x
        return name

    def by_any_name(self) -> dict[str, torch.Tensor]:
        """Return the tensors by all their names, aliases included."""
        return {**self.tensors, **{a: self.tensors[name] for a, name in self.aliases.items()}}


def _check_is_storable(x: torch.Tensor, name: str) -> None:
    why = None
    if x.layout is not torch.strided:
        why = f"its layout is {x.layout}; give x.to_dense()"
    elif is_global(x):
        return  # the checks below cannot fail, and each one costs microseconds
    elif x.is_meta:
        why = "it is on meta and has no values; give it values first"
    elif x.is_quantized or x.is_nested:
        why = "it is quantized or nested; give its parts"
    if why:
        raise ValueError(f"{name} cannot be written: {why}.")


def kind_of(obj: Any) -> str:
    """Return the kind of an object: "module", "optimizer", "state" or "value".

    "state" is an object with a ``state_dict`` method that is neither a module nor an optimizer.
    """
    if isinstance(obj, torch.nn.Module):
        return "module"
    if isinstance(obj, torch.optim.Optimizer):
        return "optimizer"
    is_state = callable(getattr(obj, "state_dict", None))
    return "state" if is_state and not isinstance(obj, type) else "value"


def state_of(name: str, obj: Any, objects: Mapping[str, Any]) -> Any:
    """Return what ``save`` stores of the object ``obj`` under ``name``.

    It is the state dict, and for an object without one the object itself. In an optimizer's state
    dict parameters have names in place of numbers. The names are from the modules in ``objects``,
    all objects of the save.
    """
    kind = kind_of(obj)
    if kind == "module":
        # keep_vars gives the parameters themselves, so a tied one is known by its id.
        return dict(obj.state_dict(keep_vars=True))
    if kind == "optimizer":
        return parameters.named_state(name, obj, parameters.names_in(objects))
    return obj.state_dict() if kind == "state" else obj


def collect(objects: Mapping[str, Any]) -> Contents:
    """Collect the tensors and values of ``objects``, by name, that a save stores. Sends nothing.

    Raises:
        TypeError, ValueError: an object contains something that cannot be stored; the message says
            where.
    """
    contents = Contents()
    for name, obj in objects.items():
        text = encode(state_of(name, obj, objects), (name,), contents.add)
        contents.values[name] = json.dumps(text, allow_nan=False)
        contents.kinds[name] = kind_of(obj)
    return contents


def digests(contents: Contents) -> dict[str, int]:
    """Return a checksum of each value and plain tensor, to find those that differ between ranks.

    The keys are ``"value step"`` for a value and ``"tensor model.scale"`` for a tensor.
    """
    checksums = {
        f"value {name}": zlib.crc32(text.encode()) for name, text in contents.values.items()
    }
    for name, x in contents.tensors.items():
        # Other subclasses, such as DTensor, consist of pieces that differ by rank anyway.
        if not is_global(x) and type(x) in (torch.Tensor, torch.nn.Parameter):
            checksums[f"tensor {name}"] = zlib.crc32(bytes_of(x))
    return checksums
