"""torch's convolution, pooling and resampling functions on global tensors, called as users call
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import consistent
from consistent import B, P, Placement, S
from tests.ranks import ON_ONE_AXIS, pool

CASES: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "adaptive_avg_pool": ((5, 4, 6, 6), lambda x: F.adaptive_avg_pool2d(x, (None, 3))),
    "adaptive_max_pool": (
        (5, 4, 6, 6),
        lambda x: F.adaptive_max_pool2d(x, (2, 3), return_indices=True)[0],
    ),
    "affine_grid": ((5, 2, 3), lambda x: F.affine_grid(x, [5, 3, 4, 4], align_corners=False)),
    "avg_pool": ((5, 4, 6, 6), lambda x: F.avg_pool2d(x, 2)),
    "channel_shuffle": ((5, 4, 6, 6), lambda x: F.channel_shuffle(x, 2)),
    "fold": ((5, 8, 6), lambda x: F.fold(x, (3, 4), 2)),
    "interpolate_bicubic": ((5, 4, 6, 6), lambda x: F.interpolate(x, size=(7, 9), mode="bicubic")),
    "interpolate_nearest": ((5, 4, 6, 6), lambda x: F.interpolate(x, scale_factor=2)),
    "interpolate_more": ((5, 4, 6, 6), lambda x: F.interpolate(x, scale_factor=3)),
    "interpolate_smooth": (
        (5, 4, 6, 6),
        lambda x: F.interpolate(x, size=3, mode="bilinear", antialias=True),
    ),
    "local_response_norm": ((5, 4, 6, 6), lambda x: F.local_response_norm(x, 2)),
    "lp_pool": ((5, 4, 6, 6), lambda x: F.lp_pool2d(x, 2.0, 2)),
    "max_pool1d": ((5, 4, 6), lambda x: F.max_pool1d(x, 2)),
    "max_pool2d": ((5, 4, 6, 6), lambda x: F.max_pool2d(x, 2, stride=1)),
    "max_pool2d_indices": ((5, 4, 6, 6), lambda x: F.max_pool2d(x, 2, return_indices=True)[0]),
    "max_unpool": (
        (5, 4, 6, 6),
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    ),
    "pixel_shuffle": ((5, 4, 3, 3), lambda x: F.pixel_shuffle(x, 2)),
    "unfold": ((5, 4, 3, 4), lambda x: F.unfold(x, 2)),
    "upsample_module": ((5, 4, 3, 4), torch.nn.Upsample(scale_factor=1.5, mode="bilinear")),
}
CONVOLUTIONS: dict[str, Callable[[], torch.nn.Module]] = {
    "conv1d": lambda: torch.nn.Conv1d(4, 6, 3, padding="same"),
    "conv2d": lambda: torch.nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "conv2d_reflect": lambda: torch.nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    "conv2d_depthwise": lambda: torch.nn.Conv2d(4, 4, 3, groups=4),
    "conv2d_grouped": lambda: torch.nn.Conv2d(4, 6, 3, groups=2, bias=False),
    "conv3d": lambda: torch.nn.Conv3d(4, 6, 2),
    "conv_transpose2d": lambda: torch.nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1),
}


def _placement(n: int) -> Placement:
    return Placement("cpu", range(n))


def _input(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _functions(rank: int, n: int) -> list:
    found = []
    for name, (shape, function) in CASES.items():
        for sbp in (None, B, S(0), S(1), P):
            x = (
                _input(shape)
                if sbp is None
                else consistent.distribute(_input(shape), _placement(n), sbp)
            )
            x.requires_grad_()
            y = function(x)
            y.square().sum().backward()
            pair = (y.detach(), x.grad) if sbp is None else (y.detach().full(), x.grad.full())
            found.append((name, sbp, *pair))
    return found


@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_functions_on_planes_are_those_of_one_device(n: int) -> None:
    for found in pool(n).run(_functions, n):
        for name, sbp, y, grad in found:
            if sbp is None:
                want = (y, grad)
            for a, b in zip((y, grad), want, strict=True):
                torch.testing.assert_close(a, b, msg=lambda m, at=(name, sbp): f"{at}: {m}")


def _layers(rank: int, n: int) -> list:
    found = []
    for name, make in CONVOLUTIONS.items():
        torch.manual_seed(0)
        layer = make().double()
        dims = len(layer.kernel_size)
        for sbp in (None, B, S(0), S(1)):
            for split in (None, S(0), S(1)):
                module, x = make().double(), _input((5, 4, *[6] * dims))
                module.load_state_dict(layer.state_dict())
                if sbp is not None:
                    x = consistent.distribute(x, _placement(n), sbp)
                    for key, p in list(module.named_parameters()):
                        layout = split if split and split.dim < p.ndim else B
                        new = consistent.distribute(p.detach(), _placement(n), layout)
                        module.register_parameter(key, torch.nn.Parameter(new))
                x.requires_grad_()
                y = module(x)
                y.square().sum().backward()
                values = [y.detach(), x.grad, *(p.grad for p in module.parameters())]
                found.append(
                    (name, sbp, split, values if sbp is None else [v.full() for v in values])
                )
    return found


@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_convolution_layers_are_those_of_one_device(n: int) -> None:
    for found in pool(n).run(_layers, n):
        for name, sbp, split, values in found:
            if sbp is None:
                want = values
            for a, b in zip(values, want, strict=True):
                torch.testing.assert_close(a, b, msg=lambda m, at=(name, sbp, split): f"{at}: {m}")
