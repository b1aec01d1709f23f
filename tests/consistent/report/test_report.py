"""report(): what ran, where, how it lay, what was boxed and what ran whole."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import consistent
from consistent import B, P, Placement, S
from mirrored import counting
from mirrored.transports.default import current
from tests.mirrored.transports.several_hosts.kinds import on_hosts
from tests.ranks import on_ranks, pool


def _line() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


@on_ranks(2)
def test_ops_are_counted_by_call_site_with_layouts_and_boxings(rank: int) -> None:
    p = consistent.placement("cpu", [0, 1])
    x = consistent.distribute(torch.randn(4, 6), p, S(0))
    w = consistent.distribute(torch.randn(6, 2), p, B)
    x @ w  # planned before the report opens
    with consistent.report() as r:
        for _ in range(3):
            y = x @ w
            here = _line() - 1
        z = y.to_global(sbp=B)
        there = _line() - 1
        z.sum()
    assert r.count("matmul") == 3 and r.count("sum") == 1 and r.count("softmax") == 0
    (line,) = [line for line in r.lines if line.op == "matmul"]
    assert (
        line.site == f"{__file__}:{here}"
        and line.layouts == {"S(0), B -> S(0)": 3}
        and not line.nbytes
    )
    (line,) = [line for line in r.lines if line.op == "to_global"]
    assert line.site == f"{__file__}:{there}" and line.boxings == {"S(0) -all_gather(0)-> B": 1}, (
        line
    )
    assert line.nbytes == r.nbytes == 16 and r.boxings() == line.boxings and r.whole == []
    x @ w  # after it closed
    assert r.count("matmul") == 3


@on_ranks(2)
def test_gradient_reductions_are_reported_with_the_bytes_that_are_sent(rank: int) -> None:
    p = consistent.placement("cpu", [0, 1])
    x = consistent.distribute(torch.randn(4, 6), p, S(0))
    w = consistent.distribute(torch.randn(6, 2), p, B).requires_grad_()
    loss = (x @ w).square().mean()
    with consistent.report() as r, counting() as calls:
        loss.backward()
    assert r.boxings() == {"P -all_reduce(0)-> B": 1}, r.boxings()
    assert [line.op for line in r.lines] == ["backward"] and r.nbytes == 48 == calls.bytes, (
        r.nbytes,
        calls.calls,
    )


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x * 2

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g * 2


@on_ranks(2)
def test_ops_that_ran_whole_are_named_where_that_cost_something(rank: int) -> None:
    p = consistent.placement("cpu", [0, 1])
    x = consistent.distribute(torch.randn(4, 4), p, S(0))
    b = consistent.distribute(torch.randn(4, 4), p, B)
    with consistent.report() as r:
        _Whole.apply(b)  # nothing lost: its input is whole anyway
    assert r.whole == []
    with consistent.report() as r:
        _Whole.apply(x)
    assert r.whole == ["_Whole"] and r.nbytes == 32
    assert "ran whole on every rank: _Whole" in str(r)


def _shown(rank: int, folder: str) -> None:
    p = consistent.placement("cpu", [0, 1])
    x = consistent.distribute(torch.randn(4, 4), p, P)
    with consistent.report() as outer:
        with consistent.report() as inner:
            F.relu(x)
        x + x
    assert (inner.count("relu"), inner.count("add"), outer.count("relu"), outer.count("add")) == (
        1,
        0,
        1,
        1,
    )
    text = str(outer).splitlines()
    assert text[0].split() == [
        "op",
        "count",
        "layout",
        "boxings",
        "bytes",
        "whole",
        "where",
    ] and set(text[1]) <= {"-", " "}
    assert text[2].startswith("relu") and "test_report.py:" in text[2] and "bytes boxed" in text[-1]
    page = outer.save(Path(folder) / f"{rank}" / "report.html").read_text()
    assert page.startswith("<!doctype html>") and "<code>relu</code>" in page and "&rarr;" in page


def test_it_prints_as_a_table_and_saves_as_a_page(tmp_path: Path) -> None:
    pool(2).run(_shown, str(tmp_path))


@on_ranks(2)
def test_an_error_inside_closes_the_report(rank: int) -> None:
    p = consistent.placement("cpu", [0, 1])
    x = consistent.distribute(torch.randn(4, 4), p, S(0))
    try:
        with consistent.report() as r:
            x + x
            raise KeyError
    except KeyError:
        pass
    x + x
    assert r.count("add") == 1


@on_ranks(2)
def test_the_summary_says_what_ran_and_what_was_sent(rank: int) -> None:
    p = consistent.placement("cpu", [0, 1])
    with consistent.report() as r:
        pass
    assert r.summary() == "No op on a global tensor ran."
    assert "inside its block" in str(r) and "inside its block" in r.html()
    assert "<table" not in r.html()
    with consistent.report() as r:
        x = consistent.distribute(torch.randn(4, 4), p, S(0))
        x + x
        x.to_global(sbp=B)
    here = _line() - 1
    assert r.summary() == (
        "1 op ran at 3 places; 2 boxings sent 32 B from the busiest rank, 100% of it for "
        f"`to_global` at test_report.py:{here}. No op ran whole on every rank."
    )
    assert r.bytes_by_op() == {"to_global": 32}


@on_ranks(2)
def test_an_op_that_gives_its_operand_back_has_no_arrow(rank: int) -> None:
    x = consistent.ones(4, 4, placement=consistent.placement("cpu", [0, 1]), sbp=S(0))
    with consistent.report() as r:
        x.contiguous()
        x + x
    assert [list(line.layouts) for line in r.lines] == [["S(0)"], ["S(0), S(0) -> S(0)"]]


@on_ranks(2)
def test_the_page_is_complete_in_itself_and_takes_no_text_for_html(rank: int) -> None:
    p = consistent.placement("cpu", [0, 1])
    x = consistent.distribute(torch.randn(4, 4), p, S(0))
    with consistent.report(timeline=True) as r:
        x + x  # </script><b>&
    page = r.html()
    assert "x + x  # &lt;/script&gt;&lt;b&gt;&amp;" in page  # the line of the program
    assert page.count("<script") == page.count("</script>") == 2
    assert "http" not in page and "src=" not in page and "@import" not in page
    for part in ("prefers-color-scheme:dark", "id=search", "aria-sort", "id=time", "viewport"):
        assert part in page


def _sent(rank: int) -> tuple[int, str, str]:
    placement = Placement("cpu", range(current().size))
    x = consistent.distribute(torch.ones(4, 256), placement, S(0))
    x.to_global(sbp=B)  # ranks have met
    with consistent.report() as found:
        x.to_global(sbp=B)
    return found.by_messages, found.summary(), str(found)


@pytest.mark.parametrize("hosts, sent", [("xy", [2048] * 2), ("xx", [0] * 2), ("xxy", None)])
def test_it_says_how_much_goes_to_ranks_that_share_no_memory(
    hosts: str, sent: list[int] | None
) -> None:
    told = on_hosts(hosts, _sent)
    assert sent is None or [nbytes for nbytes, *_ in told] == sent
    if sent is None:  # each piece goes once to the other host: rows 2, 1 and 1
        assert sum(nbytes for nbytes, *_ in told) == 4096
    for nbytes, summary, table in told:
        assert ("shares no memory" in summary) == ("shares no memory" in table) == (nbytes > 0)
