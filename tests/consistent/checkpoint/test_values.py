"""Values come back as they were, of their own types."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consistent.checkpoint.values import decode, encode, tensors_in


def _round(value: Any) -> Any:
    text = json.dumps(encode(value, (), lambda x, path: ".".join(path)), allow_nan=False)
    return decode(json.loads(text), lambda name: name)


class _Level(IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(2**80), 2.5, 1e-320, math.inf, -math.inf, "text \u20ac \ud800",
        b"\x00\xff", (1, (2,)), [1, [2]], {"a": 1}, {1: "a", (2, 3): None},
        {"$tuple": [1]}, {"$x": 1, "y": 2},
        {1, 2}, frozenset({"a"}), 1 + 2j, complex(0, math.inf), torch.float32, torch.Size([2, 3]),
        torch.device("cuda:1"), Path("/a/b"), Counter({2: 1}), OrderedDict([("b", 1), ("a", 2)]),
        defaultdict(list, {"a": [1]}), random.Random(3).getstate(), {}, [], (),
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_comes_back(value: Any) -> None:
    found = _round(value)
    assert found == value and type(found) is type(value)
    if isinstance(value, defaultdict):
        assert found["new"] == []


def test_numbers_of_numpy_and_nan() -> None:
    x = np.array([[1.5, math.nan]], dtype=np.float32)
    found = _round({"x": x, "y": x[0, 0], "s": np.random.RandomState(0).get_state()})
    assert found["x"].dtype == x.dtype and np.array_equal(found["x"], x, equal_nan=True)
    assert type(found["y"]) is np.float32 and found["y"] == 1.5
    assert np.array_equal(found["s"][1], np.random.RandomState(0).get_state()[1])
    assert math.isnan(_round(math.nan)) and type(_round(_Level.LOW)) is int


def test_tensors_stand_by_the_names_that_lead_to_them() -> None:
    x = torch.ones(2)
    value = {"a": [x, {"b": (x, 1)}], 3: x}
    text = encode(value, ("top",), lambda _, path: ".".join(path))
    assert tensors_in(text) == ["top.a.0", "top.a.1.b.0", "top.3"]
    found = decode(text, lambda name: x)
    assert found["a"][0] is x and found[3] is x and found["a"][1]["b"] == (x, 1)


@pytest.mark.parametrize(
    "value", [object(), lambda: 1, torch.nn.Linear, defaultdict(lambda: 1), np.array([object()])]
)
def test_what_is_no_value_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^a\.b\.0 is a "):
        encode({"b": [value]}, ("a",), lambda *_: "")


@pytest.mark.parametrize(
    "text",
    [
        {"$nothing": 1}, {"$tuple": 3}, {"$dict": [[1]]}, {"$dtype": "load"}, {"$bytes": "*"},
        {"$array": ["<f4", [9], "AAAA"]}, {"$array": ["O", [], ""]}, {"$set": [[1]]},
        {"$default": ["eval", []]},
        {"$dtype": 1}, {"$float": "x"}, {"$device": "nowhere"},
    ],
    ids=str,
)  # fmt: skip
def test_what_nobody_wrote_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a value"):
        decode({"a": [text]}, str)


_PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_KEYS = st.text() | st.integers() | st.tuples(st.integers())
_VALUES = st.recursive(
    _PLAIN,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(_KEYS, inner),
)


@given(_VALUES)
def test_any_value_comes_back(value: Any) -> None:
    found = _round(value)
    assert found == value and repr(found) == repr(value)
