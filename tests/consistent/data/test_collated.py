"""What a collate function makes besides tensors is that of the whole batch, or raises."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import consistent
from consistent import B, Placement, S
from consistent.data import loader
from consistent.data.nested import children
from tests.ranks import on_ranks

SIZE = 7


class Named(Dataset):
    """Item i has the number i and texts."""

    def __init__(self, count: int = SIZE) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i >= self.count:
            raise IndexError(i)
        return {"x": torch.tensor([i, i + 0.5]), "name": f"row {i}", "words": ["w"] * (i + 1)}


class NamedStream(IterableDataset):
    def __iter__(self) -> Any:
        return map(Named().__getitem__, range(SIZE))


class Fields(NamedTuple):
    x: torch.Tensor
    names: list[str]


@dataclass
class Data:
    x: torch.Tensor
    names: list[str]
    size: int = 0


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    names: tuple[str, ...]


class Object:
    def __init__(self, items: list) -> None:
        self.x = stacked(items)
        self.names = names(items)
        self.kind = "train"


class Circle(Object):
    def __init__(self, items: list) -> None:
        super().__init__(items)
        self.itself = [self]


class Slots:
    __slots__ = ("names", "x")

    def __init__(self, items: list) -> None:
        self.x, self.names = stacked(items), names(items)


class Encoded(UserDict):
    """As a tokenizer's batch: keys, and one encoding for each item beside them."""

    def __init__(self, items: list) -> None:
        super().__init__({"x": stacked(items)})
        self._encodings = [(name, len(name)) for name in names(items)]


def stacked(items: list) -> torch.Tensor:
    return torch.stack([item["x"] for item in items])


def names(items: list) -> list[str]:
    return [item["name"] for item in items]


def popped(items: list) -> dict[str, Any]:
    """Takes fields out of the items, as some collators do."""
    found = [item.pop("name") for item in items]
    return {"names": found, **default_collate([{"x": item["x"]} for item in items])}


def drawn(items: list) -> dict[str, Any]:
    assert random.random() < np.random.rand() + torch.rand(1).item() + 1
    return {"x": stacked(items), "names": names(items)}


def four(items: list) -> list[Any]:
    if len(items) != 4:
        raise ValueError("not four items")
    return [stacked(items), names(items)]


# What is made of a batch of seven on 2 and 3 ranks: parts of 4 and 3, and of 3, 2 and 2 items.
GIVES: dict[str, Any] = {
    "texts": lambda i: {"x": stacked(i), "name": names(i)},
    "bytes": lambda i: [stacked(i), [item["name"].encode() for item in i]],
    "a tuple": lambda i: (stacked(i), tuple(names(i))),
    "numbers": lambda i: {"x": stacked(i), "n": [len(item["words"]) for item in i]},
    "floats": lambda i: {"x": stacked(i), "n": [float(item["x"][1]) for item in i]},
    "lists of texts": lambda i: {"x": stacked(i), "words": [item["words"] for item in i]},
    "dicts": lambda i: (stacked(i), [{"name": name} for name in names(i)]),
    "objects": lambda i: (stacked(i), [range(len(item["words"])) for item in i]),
    "none": lambda i: (stacked(i), [None for _ in i], None),
    "an array": lambda i: {"x": stacked(i), "a": np.array(names(i)), "b": np.ones((len(i), 2))},
    "the size": lambda i: {"x": stacked(i), "size": len(i), "as tensor": torch.tensor(len(i))},
    "a size of numpy": lambda i: (stacked(i), np.int64(len(i)), np.array(len(i))),
    "constants": lambda i: {"x": stacked(i), "split": "train", "of": ["a", "b", "c"], "t": True},
    "a constant list of four": lambda i: (stacked(i), ["a", "b", "c", "d"], {3}, 0.5, slice(2)),
    "two fields": lambda i: [stacked(i), stacked(i) + 1],
    "three fields": lambda i: [stacked(i), stacked(i) + 1, stacked(i) + 2],
    "four fields": lambda i: [stacked(i)[:, 0], stacked(i) + 1, stacked(i) + 2, stacked(i) * 0],
    "nested": lambda i: {"a": {"b": (stacked(i), {"c": [names(i), len(i)]})}},
    "named tuple": lambda i: Fields(stacked(i), names(i)),
    "dataclass": lambda i: Data(stacked(i), names(i), len(i)),
    "frozen dataclass": lambda i: Frozen(stacked(i), tuple(names(i))),
    "an object": Object,
    "an object with slots": Slots,
    "a mapping with encodings": Encoded,
    "ordered": lambda i: OrderedDict(x=stacked(i), names=names(i)),
    "texts alone": names,
    "popped": popped,
    "drawn": drawn,
    "default": default_collate,
}

RAISES: dict[str, tuple[Any, str]] = {
    "a sum": (lambda i: (stacked(i), sum(len(item["words"]) for item in i)), "not known"),
    "a sum of a tensor": (lambda i: (stacked(i), stacked(i).sum()), "not known"),
    "a text of all": (lambda i: (stacked(i), " ".join(names(i))), "not known"),
    "words of all": (lambda i: (stacked(i), [w for item in i for w in item["words"]]), "not known"),
    "a set of names": (lambda i: (stacked(i), set(names(i))), "differs by rank"),
    "the longest": (lambda i: (stacked(i), max(len(item["words"]) for item in i)), "differs"),
    "a dict by name": (lambda i: {n: x for n, x in zip(names(i), stacked(i))}, "counts the items"),
    "tensors in a list": (lambda i: [item["x"] for item in i], "tensors for each item"),
    "targets": (lambda i: (stacked(i), [{"y": item["x"]} for item in i]), "tensors for each"),
    "items in dim 1": (lambda i: torch.zeros(4, len(i)), "counts the items"),
    "packed": (lambda i: {"x": stacked(i).view(1, -1)}, "counts the items"),
    "a flat array": (lambda i: (stacked(i), stacked(i).numpy().ravel()), "counts the items"),
    "an object in itself": (Circle, "not known"),
    "no more than a part": (four, "twice over"),
}  # fmt: skip


def shown(x: Any) -> Any:
    """``x`` as what compares: lists for tensors and arrays, the class of containers."""
    if isinstance(x, torch.Tensor):
        return "tensor", (x.full() if isinstance(x, consistent.GlobalTensor) else x).tolist()
    if isinstance(x, np.ndarray):
        return "array", x.dtype.kind, x.tolist()
    inside = children(x)
    return x if inside is None else (type(x), {key: shown(each) for key, each in inside.items()})


@on_ranks(2, 3)
def test_all_in_a_batch_is_that_of_the_whole_batch(rank: int) -> None:
    place = Placement("cpu", range(torch.distributed.get_world_size()))
    for name, collate in GIVES.items():
        data: Any = Named()
        if name == "default":
            data = [{"x": each["x"], "names": (each["name"], [each["name"]])} for each in data]
        one = DataLoader(data, batch_size=SIZE, collate_fn=collate)
        torch.manual_seed(0)
        wanted = [shown(batch) for batch in one]
        torch.manual_seed(0)
        for _ in range(2):
            batches = loader(DataLoader(data, batch_size=SIZE, collate_fn=collate), place)
            assert repr([shown(batch) for batch in batches]) == repr(wanted), name


@on_ranks(4)
def test_texts_of_a_grid_come_once_and_in_order(rank: int) -> None:
    collate = GIVES["texts"]
    for grid, sbp in (
        ([[0, 1], [2, 3]], (S(0), B)),
        ([[0, 1], [2, 3]], (B, S(0))),
        ([[3, 1], [2, 0]], (S(0), S(0))),
        ([2, 0, 1], S(0)),  # a rank is outside, and one has none of a batch of two
        ([0, 1], B),
    ):
        for data in (Named(), NamedStream()):
            batches = loader(
                DataLoader(data, batch_size=5, collate_fn=collate), Placement("cpu", grid), sbp
            )
            found = [batch["name"] for batch in batches]
            assert found == [[f"row {i}" for i in range(5)], ["row 5", "row 6"]], (grid, sbp)


@on_ranks(2)
def test_what_depends_on_the_items_otherwise_raises_on_every_rank(rank: int) -> None:
    for name, (collate, text) in RAISES.items():
        batches = loader(
            DataLoader(Named(8), batch_size=8, collate_fn=collate), Placement("cpu", [0, 1])
        )
        with pytest.raises((ValueError, RuntimeError)) as raised:
            list(batches)
        assert text in str(raised.value) and "whole=True" in str(raised.value), name
        if collate is not four:
            one = DataLoader(Named(8), batch_size=8, collate_fn=collate)
            assert len(list(loader(one, Placement("cpu", [0, 1]), whole=True))) == 1, name


@on_ranks(2)
def test_texts_that_differ_where_ranks_read_the_same_raise(rank: int) -> None:
    collate = lambda i: (stacked(i), [f"{rank}" for _ in i])  # noqa: E731
    one = DataLoader(Named(8), batch_size=8, collate_fn=collate)
    with pytest.raises(RuntimeError, match="differs between ranks that read the same"):
        list(loader(one, Placement("cpu", [0, 1]), whole=True))
