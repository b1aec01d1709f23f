"""The states of the random generators of this process, as an object with a ``state_dict``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ...forms.random import generator


class RandomState:
    """Access to the states of the random generators of torch, Python and numpy, for save and load.

    The state of torch's generator contains the count of random ops on global tensors. So these ops
    continue where they were on any number of ranks. Random numbers that a rank draws for itself
    continue only if there are as many ranks as before, because a rank cannot use the state of
    another one.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators, by "torch", "python", "numpy" and perhaps "cuda"."""
        # The count is written and read here, because the patched torch functions do so only once
        # a global tensor exists, and a program may load before it makes one.
        count = generator.draw_count(torch.default_generator)
        states = {
            "torch": generator.store_draw_count(torch.get_rng_state(), count),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore torch's CPU generator, and those of Python, NumPy and CUDA that ``state`` has."""
        torch.set_rng_state(state["torch"])
        generator.set_draw_count(
            torch.default_generator, generator.stored_draw_count(state["torch"])
        )
        if "python" in state:
            random.setstate(state["python"])
        if "numpy" in state:
            np.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
