"""What ops and messages cost on a machine, and figures that cannot be right."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from consistent.auto.machines.known import KNOWN
from consistent.cost_model.messages import PAIRWISE_MESSAGES, RING_COLLECTIVES, Wire
from consistent.cost_model.work import Work

# One hop takes 1 s inside a host and 10 s between; 100 and 10 bytes a second; two ranks a host.
SMALL = replace(
    KNOWN["a100"],
    name="small",
    ranks_per_host=2,
    peak_flops={torch.float32: 100.0, torch.float16: 200.0},
    memory_bytes_per_s=10.0,
    memory_fraction=0.5,
    inside=Wire(1.0, 100.0),
    between=Wire(10.0, 10.0),
    message_start_s=0.25,
    launch_seconds=0.5,
    efficiency=((1.0, 0.25), (100.0, 0.75)),
)


def work(flops: float, nbytes: int, dtype: torch.dtype = torch.float32, kind: str = "matmul"):
    return Work("aten.x", kind, dtype, flops, nbytes, None)


def test_an_op_takes_the_longer_of_its_products_and_its_bytes() -> None:
    assert SMALL.op_seconds(work(10000.0, 5)) == 0.5 + 100 / 0.75
    assert SMALL.op_seconds(work(1.0, 500)) == 0.5 + 100
    assert SMALL.op_seconds(work(0.0, 0, kind="view")) == 0


def test_efficiency_is_read_between_points_and_falls_to_nothing_below_them() -> None:
    assert [SMALL.reached(s) for s in (0.5, 1.0, 10.0, 100.0, 1e9)] == [
        0.125, 0.25, pytest.approx((0.25 * 0.75) ** 0.5), 0.75, 0.75,
    ]  # fmt: skip


def test_seconds_never_fall_as_a_product_grows() -> None:
    a100 = KNOWN["a100"]
    spent = [a100.op_seconds(work(2.0**k, 0, torch.bfloat16)) for k in range(10, 60)]
    assert spent == sorted(spent)


def test_a_dtype_without_a_rate_has_the_lowest() -> None:
    assert SMALL.peak(torch.float16) == 200 and SMALL.peak(torch.int64) == 100


@pytest.mark.parametrize(
    "name, ranks, seconds",
    [
        ("all_reduce", (0, 1), 1000 / 100 + 2 * 1),
        ("all_reduce", (0, 2), 1000 / 10 + 2 * 10),  # one link of each host
        ("all_reduce", (0, 1, 2, 3), 1000 / 20 + 2 * 11),  # both
        ("all_gather", (0, 1, 2, 3), 1000 / 20 + 2 * 1 + 10),
        ("all_gather", (0, 1, 2), 1000 / 10 + 1 + 10),  # the host with one rank has one link
        ("broadcast", (0, 1, 2, 3), 333 / 20 + 2 * 1 + 10),
        ("send", (0, 1), 1000 / 100 + 1),
        ("send", (1, 2), 1000 / 10 + 10),
        ("all_to_all", (0, 1, 2, 3), 2 / 3 * 1000 / 10 + 10),
        ("exchange", (0, 1), 1000 / 100 + 1),
        ("all_reduce", (3,), -0.25),
    ],
)
def test_messages_between_ranks_of_hosts(name: str, ranks: tuple, seconds: float) -> None:
    assert SMALL.message_seconds(name, 1000, ranks) == pytest.approx(0.25 + seconds)


@pytest.mark.parametrize(
    ("ranks", "links"),
    [
        ((0, 1), ("inside",)),
        ((0, 2), ("between",)),
        ((0, 1, 2, 3), ("inside", "between")),
    ],
)
def test_links_that_a_message_takes(ranks: tuple, links: tuple) -> None:
    assert SMALL.links(ranks) == links


def test_every_name_of_a_communication_has_a_price() -> None:
    from mirrored.transports.counting import BYTE_COUNTERS

    names = {name for name, _ in BYTE_COUNTERS.values()}
    assert names == {*RING_COLLECTIVES, *PAIRWISE_MESSAGES}
    assert all(KNOWN["h100-8"].message_seconds(name, 1 << 20, (0, 9)) > 0 for name in names)
    with pytest.raises(ValueError, match="there is no communication 'gather'"):
        SMALL.message_seconds("gather", 1, (0, 1))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"memory_bytes": -1}, "memory_bytes is -1; it must be above 0"),
        ({"ranks_per_host": 0}, "ranks_per_host is 0; it must be above 0"),
        ({"ranks_per_host": 1.5}, "ranks_per_host is 1.5, no whole number"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5; it is a fraction"),
        ({"launch_seconds": math.nan}, "launch_seconds is nan; it must be a finite number"),
        ({"memory_bytes_per_s": math.inf}, "memory_bytes_per_s is inf"),
        ({"host_seconds": None}, "host_seconds is None"),
        ({"inside": Wire(-1e-6, 1e9)}, "inside.latency_s is -1e-06; it must not be negative"),
        ({"between": Wire(1e-6, 0)}, "between.bytes_per_s is 0; it must be above 0"),
        ({"peak_flops": {}}, "peak_flops is empty"),
        ({"peak_flops": {torch.float32: -1.0}}, "peak_flops of torch.float32 is -1.0"),
        ({"peak_flops": {"float32": 1.0}}, "'float32', which is not a dtype"),
        ({"efficiency": ((2.0, 0.5), (1.0, 0.6))}, "in order of rising seconds"),
        ({"efficiency": ((1.0, 1.5),)}, "it is a fraction"),
        ({"efficiency": ((1.0, 0.1), (2.0, 0.9))}, "a longer product takes less time"),
        ({"efficiency": ()}, "efficiency is empty"),
        ({"device_type": "tpu"}, "device_type is 'tpu'; it must be cpu or cuda"),
    ],
)
def test_a_figure_that_cannot_be_right_is_named(change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=r"machine 'small': ") as caught:
        replace(SMALL, **change)
    assert said in str(caught.value) and "\n" not in str(caught.value)
