"""What shares memory, as a program's guards compare it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from consistent.compiled.guards import _memory_sharing
from consistent.compiled.memory import MemoryTable

PARTS = st.lists(
    st.tuples(
        st.integers(0, 1),  # memory
        st.integers(0, 20),  # offset
        st.sampled_from([torch.float32, torch.float64]),
        st.tuples(st.integers(0, 3), st.integers(0, 3)),  # sizes
        st.tuples(st.integers(0, 4), st.integers(0, 4)),  # strides
    ),
    max_size=8,
)


def _bytes_of(x: Tensor) -> set[int]:
    """Where each byte of ``x`` lies in its memory."""
    sizes, strides = x.size(), x.stride()
    found = set()
    for i in range(sizes[0]):
        for j in range(sizes[1]):
            at = (x.storage_offset() + i * strides[0] + j * strides[1]) * x.element_size()
            found |= set(range(at, at + x.element_size()))
    return found


@given(PARTS)
def test_what_overlaps_shares_memory_and_what_lies_apart_does_not(parts: list) -> None:
    memories = [torch.zeros(64), torch.zeros(64)]
    tensors = []
    for memory, offset, dtype, sizes, strides in parts:
        base = memories[memory].view(dtype)
        tensors.append(base.as_strided(sizes, strides, min(offset, base.numel() - 21)))
    where = [(part[0], _bytes_of(x)) for part, x in zip(parts, tensors, strict=True)]
    found = _memory_sharing(tensors)
    for i, (memory, own) in enumerate(where):
        others = [(j, w) for j, (m, w) in enumerate(where) if m == memory and j != i and own and w]
        assert all(found[i] == found[j] for j, there in others if own & there)
        apart = all(max(own) < min(there) or max(there) < min(own) for _, there in others)
        assert found[i] == i or not apart


def test_a_part_is_known_as_one_of_the_value_that_it_lies_in() -> None:
    flat, memory = torch.zeros(12), MemoryTable()
    memory.put(flat[:4], "first")
    memory.put(flat[4:8], "second")
    assert memory.base(flat[1:3]) == "first"
    assert memory.base(flat[5:8]) == "second"
    assert memory.base(flat[8:]) is None and memory.base(flat[3:5]) is None
