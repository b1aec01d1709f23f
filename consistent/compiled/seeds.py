"""States of torch's random generators, by which a recorder notices that a step sets them."""

from __future__ import annotations

import torch

from mirrored.transports.base.unseen import hidden_from_modes


def generator_states() -> bytes:
    """Return the states of torch's random generators, as bytes to compare.

    If they change other than by a random op, the step has set them. The bits in which this library
    keeps its own count of draws are left out.
    """
    with hidden_from_modes():
        words = torch.default_generator.get_state().view(torch.int64)
        state_bytes = (words & 0xFFFF_FFFF).numpy().tobytes()
        if torch.cuda.is_initialized():
            states = (g.get_state().numpy().tobytes() for g in torch.cuda.default_generators)
            state_bytes = b"".join([state_bytes, *states])
        return state_bytes
