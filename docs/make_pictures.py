"""Makes docs/pictures/: `python docs/make_pictures.py`.

Pictures of tensors, of a model and of schedules are the library's own. The pages are those of small
programs, which are run here on two ranks, and of a simulated step; they are photographed by
Chromium where it is installed, and else left as they were.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import consistent
from consistent import B, P, S
from consistent.pipeline.schedules import schedule
from mirrored.transports.in_process import run_ranks

FOLDER = Path(__file__).parent / "pictures"
TENSORS = {
    "tensor_split": ((8, 6), S(0), [0, 1, 2], None),
    "tensor_copies": ((8, 6), B, [0, 1, 2], None),
    "tensor_addends": ((8, 6), P, [0, 1, 2], None),
    "tensor_grid": ((8, 12), (S(0), S(1)), [[0, 1], [2, 3]], ("dp", "tp")),
    "tensor_large": ((8192, 4096), (S(0), S(1)), np.arange(256).reshape(16, 16), ("dp", "tp")),
}
CHROMIUM = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars"
).split()


class Block(nn.Module):
    """A pre-norm transformer block: f32[b, s, d] -> f32[b, s, d]."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """i64[b, s] -> f32[b, s, 256]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tok = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(layers))
        self.head = nn.Linear(64, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tok(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _save(picture: Any, name: str) -> None:
    _shrink(picture.save(FOLDER / f"{name}.png"))
    print(name)


def tensors() -> None:
    """One picture for each kind of layout, and one of many ranks."""
    for name, (shape, sbp, ranks, axes) in TENSORS.items():
        placement = consistent.placement("cpu", ranks, axes)
        spec = consistent.TensorSpec.of(placement, sbp, shape, torch.float32)
        _save(consistent.visualize(spec), name)
    consistent.visualize(spec).save(FOLDER / "tensor_large.svg")


def model() -> None:
    """Data and tensor parallel, on four simulated ranks."""

    def lay_out(rank: int) -> Any:
        grid = consistent.placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))
        plan = {
            "*.qkv.*": (B, S(0)),
            "*.up.*": (B, S(0)),
            "*.down.weight": {"sbp": (S(0), S(1)), "use": (B, S(1))},
            "tok.weight": (S(0), B),
        }
        return consistent.visualize(consistent.parallelize(GPT(12), grid, plan))

    _save(run_ranks(lay_out, 4)[0], "model")


def schedules() -> None:
    """The usual schedule, and one that hardly leaves a placement idle."""
    _save(consistent.visualize(schedule("1f1b", 4, 4, 8)), "schedule_1f1b")
    _save(consistent.visualize(schedule("zbvzerobubble", 4, 8, 8)), "schedule_zero_bubble")


def programs(folder: Path) -> None:
    """What the pages are about; each rank runs it, and rank 0 writes them."""
    dist.init_process_group("gloo")
    for name, run in (("report", reported), ("compiled", compiled), ("stages", staged)):
        torch.manual_seed(0)
        save = run()
        if dist.get_rank() == 0:
            save(folder / f"{name}.html")
    dist.destroy_process_group()


def reported() -> Any:
    """Three steps under a report with times."""
    everywhere = consistent.Placement.all("cpu")
    plan = {"*.up.*": S(0), "*.down.weight": S(1), "head.weight": S(1)}
    gpt = consistent.parallelize(GPT(2), everywhere, plan)
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.1)
    tokens = consistent.distribute(torch.randint(0, 256, (8, 32)), everywhere, S(0))

    def step() -> None:
        optimizer.zero_grad()
        logits = gpt(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()

    step()
    with consistent.report(timeline=True) as report:
        for _ in range(3):
            step()
    return report.save


def compiled() -> Any:
    """A compiled step."""
    everywhere = consistent.Placement.all("cpu")
    gpt = consistent.parallelize(GPT(2), everywhere, "zero3", verbose=False)
    optimizer = torch.optim.AdamW(gpt.parameters())

    @consistent.compile(backend="ops")
    def step(tokens: Any) -> Any:
        optimizer.zero_grad()
        logits = gpt(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(3):
        step(consistent.distribute(torch.randint(0, 256, (8, 32)), everywhere, S(0)))
    return step.show


def staged() -> Any:
    """A pipeline of two stages."""
    places = [consistent.placement("cpu", [rank]) for rank in (0, 1)]
    pipe = consistent.nn.pipeline(
        GPT(4),
        places,
        ["blocks.2"],
        loss=lambda logits, tokens: F.cross_entropy(logits.flatten(0, 1), tokens.flatten()),
    )
    tokens = torch.randint(0, 256, (16, 32))
    pipe.step(tokens, tokens)
    return pipe.show


def simulated(path: Path) -> None:
    """The page of a pipeline on 32 GPUs that nobody rented."""
    with consistent.simulate(32, "a100-8") as simulation:
        places = [consistent.placement("cuda", range(8 * k, 8 * k + 8)) for k in range(4)]
        model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(8)))
        names = ["2", "4", "6"]
        pipe = consistent.nn.pipeline(model, places, names, loss=F.mse_loss, plan="zero2")
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(65536, 8192)
        for _ in range(2):
            pipe.step(batch, batch)
            optimizer.step()
            optimizer.zero_grad()
        simulation.report().save(path)


def pages() -> None:
    """Each page in light, and that of a report in dark, too."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("pages: left as they were, for neither chromium nor google-chrome is installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        launch = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
        subprocess.run([sys.executable, *launch, __file__, "--pages", folder], check=True)
        simulated(Path(folder) / "simulated.html")
        for name, look, height in (
            ("report", "light", 2900),
            ("report", "dark", 2900),
            ("compiled", "light", 1500),
            ("stages", "light", 1600),
            ("simulated", "light", 2100),
        ):
            shot = FOLDER / f"{name}_{look}.png"
            subprocess.run(
                [
                    browser,
                    *CHROMIUM,
                    f"--user-data-dir={folder}/{name}_{look}",
                    f"--screenshot={shot}",
                    f"--window-size=1180,{height}",
                    f"{(Path(folder) / name).with_suffix('.html').as_uri()}#{look}",
                ],
                check=True,
                capture_output=True,
            )
            _shrink(shot)
            print(shot.stem)


def _shrink(path: Path) -> None:
    """Leave out the empty end of a screenshot, and keep 128 colours, which makes a fifth of it."""
    image: Any = import_module("PIL.Image")  # which matplotlib needs too
    picture = image.open(path).convert("RGB")
    pixels = np.asarray(picture)
    same = (pixels == pixels[-1, 5]).all(axis=(1, 2))
    end = min(len(pixels), int(np.flatnonzero(~same).max()) + 24)
    picture.crop((0, 0, pixels.shape[1], end)).quantize(128).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=Path, help="write the pages of this rank's programs there")
    given = parser.parse_args()
    if given.pages:
        programs(given.pages)
        return
    for make in (tensors, model, schedules, pages):
        make()


if __name__ == "__main__":
    main()
