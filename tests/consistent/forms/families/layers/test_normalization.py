"""Facts about normalization over split dims."""

from __future__ import annotations

import pytest
import torch

from consistent import distribute
from consistent.spec import B, Placement, S, Sbp
from tests.consistent.forms.form_runs import run_form
from tests.consistent.rules.examples.numbers import real
from tests.ranks import simulate


@pytest.mark.parametrize("x_sbp", [B, S(0), S(1), S(2)])
@pytest.mark.parametrize("running_sbp", [B, S(0)])
def test_running_statistics_reach_the_given_tensor_however_it_lies(
    x_sbp: Sbp, running_sbp: Sbp
) -> None:
    x, want = real(7, 5, 3), torch.zeros(5, dtype=torch.float64)
    torch.nn.functional.batch_norm(x, want, want + 1, training=True)

    def main(rank: int) -> torch.Tensor:
        placement = Placement("cpu", range(3))
        mean = distribute(torch.zeros(5, dtype=torch.float64), placement, running_sbp)
        variance = distribute(torch.ones(5, dtype=torch.float64), placement, running_sbp)
        torch.nn.functional.batch_norm(
            distribute(x, placement, x_sbp), mean, variance, training=True
        )
        return mean.to_global(sbp=B).to_local()

    for mean in simulate(main, 3):
        torch.testing.assert_close(mean, want)


def test_channels_split_over_ranks_share_groups() -> None:
    # 6 channels in 2 groups over 4 ranks: no rank holds whole groups.
    x = real(2, 6, 3)
    pieces = [y for y, _ in run_form("group_norm", torch.group_norm, (x,), (S(1),), 2, ranks=4)]
    torch.testing.assert_close(torch.cat(pieces, 1), torch.group_norm(x, 2))


def test_group_norm_sends_statistics_only() -> None:
    small = {
        sent for _, sent in run_form("group_norm", torch.group_norm, (real(2, 6, 30),), (S(2),), 2)
    }
    large = {
        sent
        for _, sent in run_form("group_norm", torch.group_norm, (real(2, 6, 3000),), (S(2),), 2)
    }
    assert small == large


def test_bfloat16_statistics_are_taken_in_float32() -> None:
    x = (real(4, 3000) + 100).to(torch.bfloat16)
    pieces = [y for y, _ in run_form("layer_norm", torch.layer_norm, (x,), (S(1),), (3000,))]
    assert pieces[0].dtype == torch.bfloat16
    torch.testing.assert_close(
        torch.cat(pieces, 1), torch.layer_norm(x, (3000,)), rtol=2e-2, atol=2e-2
    )


def test_rms_norm_takes_the_epsilon_that_torch_takes() -> None:
    x = real(4, 30).float() * 1e-4
    pieces = [y for y, _ in run_form("rms_norm", torch.rms_norm, (x,), (S(1),), (30,))]
    torch.testing.assert_close(torch.cat(pieces, 1), torch.rms_norm(x, (30,)))
