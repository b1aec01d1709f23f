"""visualize(x): the part that each rank holds, as text, SVG and PNG."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import consistent
from consistent import B, P, S, TensorSpec
from consistent.visualize.holdings import bytes_together, rank_part, sentences
from mirrored import counting
from tests.ranks import pool


def _grid() -> Any:  # ranks of a pool import this file, and their world is smaller
    return consistent.placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))


def _spec(shape: tuple[int, ...], *sbp: Any, placement: Any = None) -> TensorSpec:
    return TensorSpec.of(
        placement or consistent.placement("cpu", [0, 1, 2]), sbp, shape, torch.float32
    )


def test_uneven_pieces_fill_their_part_of_the_tensor() -> None:
    assert consistent.visualize(_spec((8, 6), S(0))).text() == (
        """\
f32[8, 6] S(0) on placement("cpu", ranks=[0, 1, 2])
dim 0 from top to bottom, dim 1 from left to right

rank 0      rank 1      rank 2
██████████  ··········  ··········
██████████  ··········  ··········
··········  ██████████  ··········
··········  ··········  ██████████
[0:3, :]    [3:6, :]    [6:8, :]
72 B        72 B        48 B

axis 0, 3 ranks: S(0), dim 0 of 8 is cut into pieces of 3 or 2
a rank holds at most 72 B of 192 B (38%); all 3 together 192 B"""
    )


def test_rows_and_columns_are_axes_and_copies_and_addends_are_named() -> None:
    text = consistent.visualize(_spec((8, 6), S(1), P, placement=_grid())).text(blocks=False)
    assert text.isascii() and "/" * 5 + "....." in text
    lines = [line.split() for line in text.splitlines()]
    at = lines.index(["tp", "=", "0", "tp", "=", "1"])
    assert lines[at + 1] == ["dp", "=", "0", "rank", "0", "rank", "1"]
    assert text.count("addend 1/2") == text.count("addend 2/2") == 2 and "[:, 3:6]" in text
    assert "axis 1 (tp), 2 ranks: P, each holds an addend; the tensor is their sum" in text
    assert "copy 2/2" in consistent.visualize(_spec((8, 6), S(1), B, placement=_grid())).text()


@pytest.mark.parametrize("sbp", [*itertools.product((S(0), S(1), B, P), repeat=2)], ids=str)
def test_what_ranks_hold_adds_up(sbp: Any) -> None:
    spec = TensorSpec.of(
        consistent.placement("cpu", [[0, 1, 2], [3, 4, 5]]), sbp, (7, 4), torch.float64
    )
    held = [rank_part(spec, at) for at in itertools.product(range(2), range(3))]
    assert [h.rank for h in held] == list(range(6))
    assert sum(h.nbytes for h in held) == bytes_together(spec)
    regions = {h.piece: h.region for h in held}
    assert all(regions[h.piece] == h.region for h in held)
    said = " ".join(sentences(spec))
    for h in held:  # the sizes that the sentences name are those that occur
        for dim in (0, 1):
            assert h.sizes[dim] == spec.shape[dim] or re.search(rf"\b{h.sizes[dim]}\b", said)


LARGE = {
    "64 ranks": ((1000, 16), S(0), range(64)),
    "grid": ((8, 6), (S(0), B), [[0, 1], [2, 3]]),
    "4096 ranks": ((50, 3, 16), (S(0), S(2), B), np.arange(4096).reshape(8, 16, 32)),
    "scalar": ((), B, [0, 1]),
    "empty piece": ((2,), S(0), [0, 1, 2]),
    "no elements": ((0, 4), S(0), [0, 1, 2]),
}


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("name", LARGE)
def test_it_fits_its_width_and_large_placements_are_summarised(name: str, width: int) -> None:
    shape, sbp, ranks = LARGE[name]
    spec = TensorSpec.of(consistent.placement("cpu", ranks), sbp, shape, torch.float32)
    picture = consistent.visualize(spec)
    text = picture.text(width=width)
    assert max(map(len, text.splitlines())) <= width and text.count("\n") < 80
    assert len(picture.svg()) < 60_000
    ElementTree.fromstring(picture.svg())


def test_colours_differ_by_piece_and_change_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = consistent.visualize(_spec((8, 6), S(1), B, placement=_grid()))
    coloured = picture.text(colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == picture.text()
    assert len(set(re.findall(r"38;5;(\d+)", coloured))) == 2
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" in str(picture)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in str(picture)


def test_it_is_saved_as_svg_and_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = consistent.visualize(_spec((8, 6), P))
    assert picture.save(tmp_path / "a" / "x.svg").read_text() == picture.svg()
    with pytest.raises(
        ValueError, match="'x.gif' ends in '.gif', and a picture is an SVG or a PNG"
    ):
        picture.save("x.gif")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match='matplotlib, which is not installed.*save\\("x.svg"\\)'):
        picture.save(tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_a_png_is_made_where_matplotlib_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = consistent.visualize(_spec((8, 6), P)).save(tmp_path / "x.png")
    assert made.read_bytes().startswith(b"\x89PNG")


def _alone(rank: int) -> Any:
    p = consistent.placement("cpu", [0, 1])
    x = consistent.distribute(torch.randn(4, 6), p, S(0))
    if rank:
        return None
    with counting() as log:
        picture = consistent.visualize(x)
        text = picture.text() + picture.svg()
    return log.names, text == consistent.visualize(x._spec).text() + picture.svg()


def test_one_rank_may_ask_for_the_picture_of_a_tensor() -> None:
    assert pool(2).run(_alone)[0] == ([], True)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.ones(2, 3), "x is a plain tensor of shape \\(2, 3\\).*consistent.distribute"),
        (consistent.placement("cpu", 0), "a placement alone.*TensorSpec.of"),
        ("x", "of type str"),
    ],
    ids=["plain", "placement", "str"],
)
def test_what_has_no_picture_is_refused(x: Any, says: str) -> None:
    with pytest.raises(TypeError, match=f"(?s)visualize: .*{says}"):
        consistent.visualize(x)
