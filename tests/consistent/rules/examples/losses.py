"""Calls that prove the rows of consistent/rules/loss.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tests.brute_force import Example, example, fixed
from tests.consistent.rules.examples.numbers import real, unit, whole
from tests.ranks import ALL

_nn = torch._C._nn
REDUCTIONS = (0, 1, 2)


def _sign(*shape: int) -> torch.Tensor:
    return fixed(whole(*shape, low=0, high=2).double() * 2 - 1)


def _classes(shape: tuple[int, ...], classes: int, ignored: int = -100) -> torch.Tensor:
    """Targets of which some are ignored, unevenly over the shards."""
    target = whole(*shape, low=0, high=classes)
    target.view(-1)[:2] = ignored
    return target


def _elementwise() -> Iterator[Example]:
    for r in REDUCTIONS:
        for f in (
            _nn.l1_loss,
            _nn.mse_loss,
            _nn.soft_margin_loss,
            _nn.smooth_l1_loss,
            _nn.huber_loss,
        ):
            yield example(f, real(5, 7), fixed(real(5, 7)), r)
        yield example(_nn.smooth_l1_loss, real(5, 2), real(5, 2), r, 0.5)
        yield example(_nn.huber_loss, real(5, 2), real(5, 2), reduction=r, delta=0.5)
        yield example(_nn.binary_cross_entropy, unit(5, 7), unit(5, 7), None, r)
        yield example(_nn.binary_cross_entropy, unit(5, 7), unit(5, 7), fixed(unit(5, 1)), r)
        yield example(
            torch.binary_cross_entropy_with_logits, real(5, 7), unit(5, 7), None, fixed(unit(7)), r
        )
        yield example(
            torch.binary_cross_entropy_with_logits, real(5, 7), unit(5, 7), fixed(unit(7)), None, r
        )
        yield example(torch.kl_div, real(5, 7), unit(5, 7), r, log_target=False)
        yield example(torch.kl_div, real(5, 7), real(5, 7), r, log_target=True)
        yield example(torch.hinge_embedding_loss, real(5, 7), _sign(5, 7), 1.0, r)
        yield example(torch.margin_ranking_loss, real(5, 7), real(5, 7), _sign(5, 7), 0.1, r)
        yield example(torch.poisson_nll_loss, real(5, 7), unit(5, 7), True, False, 1e-8, r)


def _by_row() -> Iterator[Example]:
    for r in REDUCTIONS:
        yield example(torch.cosine_embedding_loss, real(5, 7), real(5, 7), _sign(5), 0.1, r)
        yield example(
            torch.triplet_margin_loss, real(5, 7), real(5, 7), real(5, 7), 1.0, 2, 1e-6, False, r
        )
        yield example(_nn.multi_margin_loss, real(5, 7), whole(5, low=0, high=7), 1, 1.0, None, r)
        yield example(
            _nn.multi_margin_loss, real(5, 7), whole(5, low=0, high=7), 1, 1.0, fixed(unit(7)), r
        )
        yield example(_nn.multilabel_margin_loss, real(5, 7), whole(5, 7, low=-1, high=7), r)


def _by_class() -> Iterator[Example]:
    shapes = ((5, 7), (4, 7, 3), (2, 2, 3, 5))
    for choice in itertools.product(range(3), range(3), range(2), range(2)):
        if sum(choice) % 2 and not ALL:  # every three choices are seen together without these
            continue
        r, shape, smoothing = REDUCTIONS[choice[0]], shapes[choice[1]], (0.0, 0.3)[choice[2]]
        rows, weight = (shape[0], *shape[2:]), fixed(unit(shape[1])) if choice[3] else None
        indices, probabilities = _classes(rows, shape[1], 1), real(*shape).softmax(1)
        for target, ignored in ((indices, 1), (probabilities, -100)):
            yield example(
                _nn.cross_entropy_loss, real(*shape), target, weight, r, ignored, smoothing
            )
    for r in REDUCTIONS:
        for shape in shapes:
            indices = _classes((shape[0], *shape[2:]), shape[1])
            yield example(_nn.nll_loss_nd, real(*shape), indices, None, r, -100)
        yield example(_nn.nll_loss, real(5, 7), _classes((5,), 7, 3), fixed(unit(7)), r, 3)
        yield example(
            _nn.nll_loss2d, real(2, 5, 3, 4), _classes((2, 3, 4), 5), fixed(unit(5)), r, -100
        )
        yield example(_nn.nll_loss_nd, real(7), torch.tensor(3), None, r, -100)
        yield example(_nn.cross_entropy_loss, real(7), torch.tensor(3), None, r, -100, 0.1)
        yield example(_nn.cross_entropy_loss, real(7), real(7).softmax(0), None, r)
    yield example(_nn.cross_entropy_loss, real(3, 5), torch.full((3,), -100), None, 1)
    # Left out, the reduction is none in one of torch's bindings and mean in the other.
    yield example(_nn.cross_entropy_loss, real(3, 5), _classes((3,), 5))
    yield example(torch.ops.aten.cross_entropy_loss, real(3, 5), _classes((3,), 5))


EXAMPLES = (*_elementwise(), *_by_row(), *_by_class())
