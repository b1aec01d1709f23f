"""The list of the changes that the library makes in torch, and when it makes them.

Importing the library changes nothing. The themes below (groups of changes, one for each module of
this folder) are installed once, when the first global tensor of the process is about to be made;
docs/design/shard.md lists what each of them changes and why. The objects in torch's namespaces stay
the same (``redirect`` replaces the C function behind a builtin), so that scripts, pickles, tracers
and names imported earlier are redirected, too.
"""

from __future__ import annotations

from ..dispatch import _C, hook
from ..tensor import methods  # noqa: F401  (registers its handlers)
from . import (
    backward,
    checkpoint,
    compiling,
    flat_gradients,
    flexible,
    flops,
    foreach,
    functions,
    numbers,
    optimizer_state,
    optimizer_steps,
    overrides,
    printing,
    private_names,
    random_state,
    recurrent,
    refusals,
    saved_on_cpu,
    staging,
    views_of_modules,
)

THEMES = (
    private_names.check_names,  # first, so that nothing is changed in a torch that is refused
    hook.enter_functions,
    backward.install,
    functions.install,
    checkpoint.install,
    flexible.install,
    flops.install,
    foreach.install,
    flat_gradients.install,
    optimizer_state.install,
    optimizer_steps.install,
    saved_on_cpu.install,
    random_state.install,
    recurrent.install,
    staging.install,
    numbers.install,
    refusals.install,
    overrides.install,
    printing.install,
    views_of_modules.install,
)


def install() -> None:
    """Make all changes: call each function in ``THEMES``, in this order."""
    for theme in THEMES:
        theme()


def install_with_first_tensor() -> None:
    """Arrange that ``install`` is called when the first global tensor is about to be made."""
    compiling.install()
    _C.on_first_tensor(install)
