"""Variables: parameters that jobs share by name.

A variable is one global tensor. Under the mirrored view every rank works on a plain parameter that
shares its storage, so a job of either view sees what a job of the other has learnt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...forms.random import generator
from ...forms.random.generator import RngState
from ...spec import B, Placement, Sbp
from ...tensor.making import factories
from ...tensor.making.create import distribute
from .. import session
from .initializers import Initializer, default_initializer


@dataclass
class Variable:
    """A named parameter."""

    name: str
    value: Any  # the global tensor
    initializer: Initializer
    seed: int | None
    copy: torch.nn.Parameter | None = None  # the mirrored view's, in the same storage

    @property
    def trainable(self) -> bool:
        """Whether optimizers change it."""
        return self.value.requires_grad

    def initialize(self) -> None:
        """Give it its initial values: they depend on seed and name, not on what else was drawn."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=8).digest()
        seed = generator.get_state().seed if self.seed is None else self.seed
        with (
            generator.separate(RngState(seed ^ int.from_bytes(digest, "little"), 0)),
            torch.no_grad(),
        ):
            self.initializer(self.value)

    def load(self, whole: torch.Tensor) -> None:
        """Take the values of ``whole``, which every rank has."""
        with torch.no_grad():
            self.value.copy_(distribute(whole, self.value.placement, self.value.sbp))

    def seen_by(self, view: str) -> Any:
        """The tensor that a job of ``view`` computes with."""
        if view == "consistent":
            return self.value
        if any(entry is not B for entry in self.value.sbp):
            raise ValueError(
                f"get_variable: {self.name!r} is {self.value.sbp[0]}, and a job under the mirrored "
                "view asks for it.\n"
                "  There every device has a copy of the model, so its variables are broadcast.\n"
                "  Leave distribute (model_distribute) out, or run the job under "
                "scope.consistent_view()."
            )
        if self.copy is None:
            self.copy = torch.nn.Parameter(
                self.value.detach().to_local(), requires_grad=self.trainable
            )
        return self.copy


def get_variable(
    name: str,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    initializer: Initializer | None = None,
    trainable: bool = True,
    random_seed: int | None = None,
    distribute: Sbp = B,
    *,
    placement: Placement | None = None,
) -> Any:
    """The variable ``name``: made at the first call, the same one at every later call, in any job.

    Args:
        name: by which every job finds it.
        shape: needed where it is made.
        dtype: without it that of the job, or torch's default.
        initializer: what gives its first values.
        trainable: whether it has a gradient.
        random_seed: from which the initializer draws.
        distribute: its SBP.
        placement: its devices; without it those of the scope, or of the job.

    Raises:
        ValueError: it was made with another shape, dtype or distribute; or there is none yet and no
            shape.
    """
    run = session.running()
    dtype = dtype or (run.dtype if run else torch.get_default_dtype())
    variable = session.variables.get(name)
    if variable is None:
        if shape is None:
            raise ValueError(
                f"get_variable: there is no variable {name!r}, and no shape to make it of.\n"
                f"  Known are {sorted(session.variables) or 'none'}.\n"
                "  Give its shape (and an initializer)."
            )
        value = factories.empty(
            *shape, placement=placement or session.place(), sbp=distribute, dtype=dtype
        )
        value = torch.nn.Parameter(value, requires_grad=trainable)
        variable = Variable(name, value, initializer or default_initializer, random_seed)
        variable.initialize()
        if name in session.loaded:
            variable.load(torch.load(session.loaded[name], weights_only=True, mmap=True))
        session.variables[name] = variable
    elif shape is not None:
        _check_same(variable, (tuple(shape), dtype, distribute))
    if run is not None:
        run.used[name] = variable
    return variable.seen_by(run.view if run else "consistent")


def _check_same(variable: Variable, asked: tuple) -> None:
    value = variable.value
    made = (tuple(value.shape), value.dtype, value.sbp[0])
    if made != asked:
        raise ValueError(
            f"get_variable: {variable.name!r} was made as {made[1]} {made[0]} {made[2]}, and is "
            "asked for as "
            f"{asked[1]} {asked[0]} {asked[2]}.\n"
            "  One name is one variable.\n"
            "  Give another name (layers: name=), or ask for the same."
        )
