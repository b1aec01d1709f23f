"""A change for ``Optimizer.load_state_dict``: loaded state gets the layout of its parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ..tensor.storage.step_layout import loaded_state


def install() -> None:
    """Patch how an optimizer loads a tensor of its state, to give it the parameter's layout.

    torch gives it the dtype and device of the parameter only. So a state that one process has saved
    would stay a plain tensor, whole on each rank.
    """
    original: Callable[..., Any] = Optimizer._process_value_according_to_param_policy

    @functools.wraps(original)
    def process_value(param: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return loaded_state(param, original(param, value, *args, **kwargs))

    Optimizer._process_value_according_to_param_policy = staticmethod(process_value)  # type: ignore
