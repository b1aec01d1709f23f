"""A small GPT as one writes it for one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WORDS, LENGTH, WIDTH = 17, 6, 8


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        y = self.norm1(x)
        heads = [f(y).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.drop(self.o(seen.transpose(1, 2).flatten(2)))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    """Tied embeddings if ``tied``; a skip connection over all blocks if ``skips``."""

    def __init__(
        self, blocks: int = 3, tied: bool = False, skips: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.skips = skips
        if tied:
            self.head.weight = self.words.weight
        self.double()

    def forward(self, ids: Any) -> Any:
        x = first = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        if self.skips:
            x = x + 0.5 * first
        return self.head(self.norm(x))


def loss_of(logits: Any, target: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randint(WORDS, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return made[:, :-1].contiguous(), made[:, 1:].contiguous()


def trained(
    net: GPT, steps: int, rows: int = 8, kind: Any = torch.optim.AdamW
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the gradients of the last step, in plain torch, by an optimizer of the kind."""
    optimizer = kind(net.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        ids, target = batch(step, rows)
        optimizer.zero_grad()
        loss = loss_of(net(ids), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients(net)


def gradients(net: nn.Module) -> dict[str, Any]:
    return {n: p.grad for n, p in net.named_parameters(remove_duplicate=False)}
