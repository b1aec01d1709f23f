"""State that an optimizer loads lies as the parameter that it is for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ..tensor.storage.step_layout import loaded_state


def install() -> None:
    """Torch brings each loaded tensor to its parameter's dtype and device; a global parameter has a
    layout as well. A whole plain state, as one process saves it, would else stay whole on each
    rank."""
    original: Callable[..., Any] = Optimizer._process_value_according_to_param_policy

    @functools.wraps(original)
    def brought(param: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return loaded_state(param, original(param, value, *args, **kwargs))

    Optimizer._process_value_according_to_param_policy = staticmethod(brought)  # type: ignore
