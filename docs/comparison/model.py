"""What every program in this folder trains, as it is written for one device. Run alone, it prints
the losses that the others must print; ``--save FILE`` writes the first weights and the batch for
the program in JAX, which has no torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 32, 4
WRONG = sys.argv[2] if len(sys.argv) > 2 and sys.argv[1] == "--wrong" else ""


class MLP(nn.Module):
    """[..., 32] -> [..., 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """[n, t, 32] -> [n, t, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        # A module on a part of the heads must name the size of a head, not how many there are.
        self.heads = (HEADS, -1) if WRONG == "heads" else (-1, WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, self.heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """[n, t, 32] -> [n, t, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def job(kind: type[nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    """A model with its first weights, its inputs and what it is to give: [8, 6, 32] both."""
    torch.manual_seed(0)
    return kind(), torch.randn(8, 6, WIDTH), torch.randn(8, 6, WIDTH)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def one_device(kind: type[nn.Module]) -> str:
    model, x, y = job(kind)
    optimizer, losses = adamw(model), []
    for _ in range(2):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return told(kind, losses)


def told(kind: type[nn.Module], losses: list[float]) -> str:
    return f"{kind.__name__}: loss {losses[0]:.5f}, after a step {losses[1]:.5f}"


def main() -> None:
    if sys.argv[1:2] == ["--save"]:
        kept: dict[str, np.ndarray] = {}
        for kind in (MLP, Block):
            model, x, y = job(kind)
            named = {**model.state_dict(), "x": x, "y": y}
            kept |= {f"{kind.__name__}/{name}": value.numpy() for name, value in named.items()}
        np.savez(sys.argv[2], **kept)  # type: ignore[arg-type]
    print(one_device(MLP), one_device(Block), sep="\n")


if __name__ == "__main__":
    main()
