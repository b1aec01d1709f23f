"""A shard that someone made up is refused, and what no file should set crashes nothing."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import _utils, nn

import consistent
from consistent import Placement, S
from consistent.dispatch import _C
from consistent.tensor.storage.saving import _rebuild
from tests.ranks import on_ranks

GRID = ("cpu", [0, 1], None)
F32 = torch.float32


def _laughing(depth: int) -> Any:
    """Lists that hold one another: 4 ** depth ints in a few bytes."""
    made: Any = 0
    for _ in range(depth):
        made = [made] * 4
    return made


class _Called:
    """What pickle writes for it is a call of a function."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call


def _twice() -> Any:
    return _Called(_utils._rebuild_tensor_v2, (_ones(1).untyped_storage(), 0, (2, 3), (0, 0), False, {}))  # fmt: skip  # noqa: E501


def _ones(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


# local, layout, requires_grad, extra -> what is said; at None the good one stands.
MADE_UP: dict[str, tuple[dict[str, Any], str]] = {
    "a spec among the attributes": ({"extra": {"_spec": 3}}, "'_spec' of global tensors"),
    "a moved view among the attributes": ({"extra": {"_moved_view": 3}}, "'_moved_view'"),
    "a method among the attributes": ({"extra": {"full": 3}}, "'full'"),
    "a class among the attributes": ({"extra": {"__class__": 3}}, "'__class__'"),
    "attributes with numbers for names": ({"extra": {3: 3}}, "'3'"),
    "attributes that are a list": ({"extra": [3]}, "a list, and not a dictionary"),
    "a layout of a million over a shard of two": ({"shape": (1_000_000, 3)}, "has \\[500000, 3\\]"),
    "a shard of another dtype": ({"dtype": torch.float64}, "its shard is torch.float32"),
    "a shard of other dims": ({"local": _ones(6)}, "its shard is torch.float32 \\[6\\]"),
    "a shard that is too long": ({"local": _ones(3, 3)}, "has \\[2, 3\\] here"),
    "a shard whose rows lie in each other": ({"local": _twice}, "not in the order"),
    "a shard in another order": ({"local": _ones(3, 2).t()}, "not in the order"),
    "a shard that is a number": ({"local": 3}, "its shard is a int"),
    "a shard that is missing": ({"local": None}, "its shard is a NoneType"),
    "a shard that is a parameter": ({"local": nn.Parameter(_ones(2, 3))}, "a Parameter"),
    "a sparse shard": ({"local": _ones(2, 3).to_sparse()}, "not a plain dense tensor"),
    "a shard without values": ({"local": _ones(2, 3).to("meta")}, "has no values"),
    "a quantized shard": (
        {"local": torch.quantize_per_tensor(_ones(2, 3), 0.1, 0, torch.qint8)}, "not a plain dense",
    ),
    "a layout that is a text": ({"layout": "S(0)"}, "its layout is not a grid"),
    "a layout of two": ({"layout": (GRID, "S(0)")}, "its layout is not a grid"),
    "a layout with a list": ({"layout": [GRID, "S(0)", (4, 3), F32]}, "its layout is not a grid"),
    "a grid that is a number": ({"grid": 7}, "its layout is not a grid"),
    "a grid of texts": ({"grid": ("cpu", ["0", "1"], None)}, "its placement is not a grid"),
    "a grid of lists that hold each other": ({"grid": ("cpu", _laughing(30), None)}, "placement"),
    "a grid of large ranks": ({"grid": ("cpu", [0, 1 << 70], None)}, "in a world of 2"),
    "a rank below none": ({"grid": ("cpu", [0, -1], None)}, "outside the world|is at"),
    "a rank that stands twice": ({"grid": ("cpu", [0, 0], None)}, "stands twice"),
    "no ranks": ({"grid": ("cpu", [], None)}, "not a grid of ranks"),
    "another device": ({"grid": ("meta", [0, 1], None)}, "not a device type"),
    "names of axes that are numbers": ({"grid": ("cpu", [0, 1], (3,))}, "names of its axes"),
    "an SBP that is a number": ({"sbp": 0}, "its SBP is not a text"),
    "an SBP that is a program": ({"sbp": "__import__('os').mkdir('evil')"}, "sbp|SBP"),
    "an SBP of another dim": ({"sbp": "S(7)"}, "splits dim 7"),
    "an SBP of a large dim": ({"sbp": "S(99999999999999999999)"}, "splits dim"),
    "two SBPs for one axis": ({"sbp": "(S(0), B)"}, "has 2 entries"),
    "a shape below nothing": ({"shape": (4, -3)}, "its shape is not one"),
    "a shape that overflows": ({"shape": (1 << 40, 1 << 40)}, "its shape is not one"),
    "an empty shape that overflows": ({"shape": (0, 1 << 62)}, "its shape is not one"),
    "a shape of floats": ({"shape": (4.0, 3)}, "its shape is not one"),
    "a dtype that is a text": ({"dtype": "float32"}, "its dtype not one"),
    "truth values that are addends": (
        {"sbp": "P", "dtype": torch.bool, "local": _ones(4, 3, dtype=torch.bool)}, "no sum",
    ),
    "requires_grad that is a text": ({"grad": "no"}, "requires_grad is a str"),
    "a place that is a text": ({"at": "(0,)"}, "not a coordinate"),
    "a place that is a tensor": ({"at": torch.ones(1)}, "not a coordinate"),
}  # fmt: skip


def _file(rank: int, change: dict[str, Any]) -> io.BytesIO:
    local = change.get("local", lambda: _ones(2, 3))
    layout = change.get("layout") or (
        change.get("grid", GRID), change.get("sbp", "S(0)"), change.get("shape", (4, 3)),
        change.get("dtype", F32),
    )  # fmt: skip
    call = _Called(
        _rebuild,
        (local() if isinstance(local, Callable) else local, layout, change.get("at", (rank,)),
         change.get("grad", False), change.get("extra", {})),
    )  # fmt: skip
    file = io.BytesIO()
    torch.save({"x": call}, file)
    file.seek(0)
    return file


@on_ranks(2)
def test_what_nobody_saved_is_refused(rank: int) -> None:
    x = torch.load(_file(rank, {}), weights_only=True)["x"]
    assert x.sbp == (S(0),) and torch.equal(x.full(), _ones(4, 3))
    for name, (change, said) in MADE_UP.items():
        for weights_only in (True, False):
            with pytest.raises((ValueError, RuntimeError, pickle.UnpicklingError), match=said):
                torch.load(_file(rank, change), weights_only=weights_only)
                raise AssertionError(name)


@on_ranks(2)
def test_a_shard_that_the_file_holds_twice_stays_what_it_is(rank: int) -> None:
    local = _ones(2, 3)
    file = io.BytesIO()
    layout = (GRID, "S(0)", (4, 3), F32)
    torch.save([local, _Called(_rebuild, (local, layout, (rank,), True, {})), local], file)
    file.seek(0)
    first, x, last = torch.load(file, weights_only=True)
    assert type(first) is torch.Tensor and first is last and not first.requires_grad
    assert x.requires_grad and torch.equal(x.full(), _ones(4, 3))


@on_ranks(2)
def test_state_that_a_file_sets_later_crashes_nothing(rank: int) -> None:
    good = _Called(_rebuild, (_ones(2, 3), (GRID, "S(0)", (4, 3), F32), (rank,), False, {}))
    call = _Called(_utils._rebuild_parameter_with_state, (good, False, {}, {"_spec": 3}))
    file = io.BytesIO()
    torch.save(call, file)
    file.seek(0)
    x = torch.load(file, weights_only=True)
    for use in USES:
        with pytest.raises((TypeError, AttributeError)):
            use(x)


USES: list[Callable[[Any], Any]] = [
    lambda x: x + 1,
    lambda x: torch.relu(x),
    lambda x: 2 - x,
    lambda x: x.view(-1),
    lambda x: x.expand(2, 4, 3),
    lambda x: x.sum().item(),
    lambda x: torch._foreach_add([x, x], 1.0),  # pyright: ignore
    lambda x: torch.cat([x, x]),
    lambda x: x[0],
    lambda x: x.add_(1),
    lambda x: x.full(),
    lambda x: x.to_global(sbp=S(1)),
    lambda x: x.shape,
    lambda x: x.dtype,
    lambda x: repr(x) + x.none,
    lambda x: x.requires_grad_().backward(),
    lambda x: pickle.dumps(x),
    lambda x: nn.functional.linear(x, torch.ones(3, 3)),
]


@on_ranks(2)
def test_a_spec_of_any_type_crashes_nothing(rank: int) -> None:
    class Like:
        shape, dtype, layout, ndim = (4, 3), F32, None, 2

    for given in (3, None, "spec", [], (), Like(), object(), torch.ones(2), Placement("cpu", [0])):
        for use in USES:
            x: Any = consistent.ones(4, 3, placement=Placement("cpu", [0, 1]), sbp=S(0))
            x.requires_grad_()
            (x * 2).sum().backward()
            x._spec = given
            with contextlib.suppress(TypeError, AttributeError, RuntimeError):
                use(x)
            with pytest.raises(TypeError, match="and not a TensorSpec"):
                x + 1
            with contextlib.suppress(TypeError):
                _ = x.grad  # where it is known already, it has a spec of its own
        with pytest.raises(TypeError, match="attach: a plain tensor and a TensorSpec"):
            _C.attach(torch.ones(2), given)
    with pytest.raises(TypeError, match="attach: a plain tensor and a TensorSpec"):
        _C.attach(3, x._spec)
