"""The states of the random generators of this process, as an object with a ``state_dict``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ...forms.random import generator


class RandomState:
    """torch's generators, Python's and numpy's.

    The count of the random ops of global tensors is in the state of torch's generator, so these
    go on where they were, on any number of ranks. Numbers that a rank draws for itself go on only
    where there are as many ranks as before: other ranks' states are none of its own.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states now."""
        # The count is put in and taken out here: torch's functions do so only once there is a
        # global tensor, and a program may load before it makes one.
        count = generator.count(torch.default_generator)
        found = {
            "torch": generator.with_count(torch.get_rng_state(), count),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these states; one that is missing stays as it is."""
        torch.set_rng_state(state["torch"])
        generator.set_count(torch.default_generator, generator.count_in(state["torch"]))
        if "python" in state:
            random.setstate(state["python"])
        if "numpy" in state:
            np.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
