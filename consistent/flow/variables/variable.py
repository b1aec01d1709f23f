"""Variables: parameters that jobs share by name.

A variable is one global tensor. Under the mirrored view every rank works on a plain parameter that
shares its storage, so a job under one view sees the updates that a job under the other has made.
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
    """Named parameter that jobs share, with what is needed to initialize it.

    Attributes:
        name: the key by which jobs find it.
        value: the parameter, a global tensor.
        initializer: fills it with its initial values.
        seed: seed for the initializer; None for the program's seed.
        copy: plain parameter in the same storage, with which mirrored jobs compute; None before
            the first mirrored job.
    """

    name: str
    value: Any  # the global tensor
    initializer: Initializer
    seed: int | None
    copy: torch.nn.Parameter | None = None  # of the mirrored view, in the same storage

    @property
    def trainable(self) -> bool:
        """True if optimizers change the variable."""
        return self.value.requires_grad

    def initialize(self) -> None:
        """Set the initial values.

        They depend on the seed and the name only, not on random numbers that the program has drawn
        before.
        """
        digest = hashlib.blake2b(self.name.encode(), digest_size=8).digest()
        # A state of its own, so that the order in which variables are made does not matter.
        seed = generator.get_state().seed if self.seed is None else self.seed
        with (
            generator.separate_state(RngState(seed ^ int.from_bytes(digest, "little"), 0)),
            torch.no_grad(),
        ):
            self.initializer(self.value)

    def load(self, whole: torch.Tensor) -> None:
        """Set the values to those of the whole tensor ``whole``, which every rank passes."""
        with torch.no_grad():
            self.value.copy_(distribute(whole, self.value.placement, self.value.sbp))

    def seen_by(self, view: str) -> Any:
        """Return the tensor with which a job of ``view`` computes.

        It is the global tensor for "consistent", and a plain parameter with the same storage for
        "mirrored". Raises ValueError for "mirrored" if the variable is not replicated.
        """
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
    """Return the variable ``name``, which the first call makes and later calls of any job share.

    Args:
        name: key by which every job finds the variable.
        shape: shape of the variable, required for the call that makes it.
        dtype: its dtype; by default that of the job, or torch's default.
        initializer: function that sets the initial values.
        trainable: whether the variable has a gradient.
        random_seed: seed of the random numbers that the initializer draws.
        distribute: its layout: B (replicated) or a split.
        placement: its devices; by default those of the scope, or of the job.

    Raises:
        ValueError: the variable was made with another shape, dtype or distribute; or there is no
            such variable yet, and no shape to make it.
    """
    run = session.current_run()
    dtype = dtype or (run.dtype if run else torch.get_default_dtype())
    variable = session.variables.get(name)
    if variable is None:
        if shape is None:
            raise ValueError(
                f"get_variable: there is no variable {name!r}, and no shape to make it of.\n"
                f"  Known are {sorted(session.variables) or 'none'}.\n"
                "  Give its shape (and an initializer)."
            )
        target = placement or session.current_or_default_placement()
        value = factories.empty(*shape, placement=target, sbp=distribute, dtype=dtype)
        value = torch.nn.Parameter(value, requires_grad=trainable)
        variable = Variable(name, value, initializer or default_initializer, random_seed)
        _register(variable)
    elif shape is not None:
        _check_matches(variable, (tuple(shape), dtype, distribute))
    if run is not None:
        # The job's optimizer steps the variables that its function has used.
        run.used[name] = variable
    return variable.seen_by(run.view if run else "consistent")


def _register(variable: Variable) -> None:
    """Give a new variable its values and register it, so that every job finds it by its name.

    The values are those of ``CheckPoint.load`` if that was called before, else the initial ones.
    """
    variable.initialize()
    if variable.name in session.loaded:
        values = torch.load(session.loaded[variable.name], weights_only=True, mmap=True)
        variable.load(values)
    session.variables[variable.name] = variable


def _check_matches(variable: Variable, requested: tuple) -> None:
    value = variable.value
    existing = (tuple(value.shape), value.dtype, value.sbp[0])
    if existing != requested:
        raise ValueError(
            f"get_variable: {variable.name!r} was made as {existing[1]} {existing[0]} "
            f"{existing[2]}, and is asked for as {requested[1]} {requested[0]} {requested[2]}.\n"
            "  One name is one variable.\n"
            "  Give another name (layers: name=), or ask for the same."
        )
