"""Faults planted in the kernels, one at a time, and what finds each when they run on the CPU."""

from __future__ import annotations

import re
import shutil
from typing import NamedTuple

import pytest

from tests.csrc.compiling import ROOT
from tests.csrc.emulating import CSRC, MEMORY, THREADS, build_kernels, needs_emulator, outcome
from tests.ranks import ALL

DIFFER = "CUDA and CPU differ"
RACE = "data race"


class Fault(NamedTuple):
    what: str
    file: str  # in csrc
    is_: str  # occurs once in it
    was: str  # what a mistake would make of it
    program: str  # the kernels that are run
    sanitizer: str
    found: str  # what is printed, a regular expression
    environment: dict[str, int] = {}


REDUCE, ENTROPY = "kernels/reduce_shards.cu", "kernels/split_cross_entropy.cu"
EMBEDDING, RANDOM, MOVES = (
    "kernels/masked_embedding.cu",
    "kernels/random.cu",
    "peer/device_moves.cu",
)
BLOCK, VECTOR, WALK = "kernels/block.cuh", "kernels/vector.cuh", "peer/device_walk.h"

FAULTS = [
    Fault(
        "slots that are written while threads read them", ENTROPY,
        "shared[turn ^= 1]", "shared[turn]",
        "split_cross_entropy", THREADS, RACE,
    ),
    Fault(
        "no barrier before the slots are read", BLOCK,
        "before they are written.\n  __syncthreads();", "before they are written.",
        "split_cross_entropy", THREADS, RACE,
    ),
    Fault(
        "a barrier that one warp alone takes", BLOCK,
        "before they are written.\n  __syncthreads();",
        "before they are written.\n  if (warp == 0) __syncthreads();",
        "split_cross_entropy", MEMORY, "no thread can go on",
    ),
    Fault(
        "warps that take different barriers", BLOCK,
        "before they are written.\n  __syncthreads();",
        "before they are written.\n"
        "  if (warp == 0)\n    __syncthreads();\n  else\n    __syncthreads();",
        "split_cross_entropy", MEMORY, "threads wait at different __syncthreads",
    ),
    Fault(
        "a mask of half a warp", ENTROPY,
        "kAll = 0xFFFFFFFFu", "kAll = 0x0000FFFFu",
        "split_cross_entropy", MEMORY, "a lane is not in its own mask",
    ),
    Fault(
        "a step of the shuffles left out", BLOCK,
        "int step = kWarp / 2;", "int step = kWarp / 4;",
        "split_cross_entropy", MEMORY, DIFFER,
    ),
    Fault(
        "no barrier between the strips of a block", ENTROPY,
        "which are written next.\n    __syncthreads();", "which are written next.",
        "split_cross_entropy", THREADS, RACE,
    ),
    Fault(
        "no barrier before the first warp joins the others", ENTROPY,
        "before they are written.\n    __syncthreads();", "before they are written.",
        "split_cross_entropy", THREADS, RACE,
    ),
    Fault(
        "a thread that reads what another one wrote", REDUCE,
        "piece = pieces()[(i * columns + c) / kCount];",
        "piece = pieces()[(i * columns + (c + kCount) % columns) / kCount];",
        "reduce_shards", THREADS, RACE,
    ),
    Fault(
        "a tail that goes one too far", ENTROPY,
        "c < split.held; c += kRowThreads) one(c);\n    mine =",
        "c <= split.held; c += kRowThreads) one(c);\n    mine =",
        "split_cross_entropy", MEMORY, "heap-buffer-overflow",
    ),
    Fault(
        "one unit too many", MOVES,
        "source.row * source.count / kBytes)", "source.row * source.count / kBytes + 1)",
        "device_moves", MEMORY, "heap-buffer-overflow",
    ),
    Fault(
        "a head that does not end at a boundary", VECTOR,
        "kPackOf<T> - odd;", "odd;",
        "split_cross_entropy", MEMORY, "misaligned address",
    ),
    Fault(
        "packs that are written where only reads are aligned", ENTROPY,
        "packed ? head_of(x, split.held) : split.held;",
        "packed || x ? head_of(x, split.held) : split.held;",
        "split_cross_entropy", MEMORY, "misaligned address",
    ),
    Fault(
        "a narrow vector that is read as a wide one", REDUCE,
        "|| !epilogue.narrow)", "|| !epilogue.narrow || column >= 0)",
        "reduce_shards", MEMORY, f"{DIFFER}|heap-buffer-overflow|heap-use-after-free",
    ),
    Fault(
        "a part's alignment that is not asked for", REDUCE,
        "fits = fits && multiple(parts.data[p], in);", "fits = fits && p < 64;",
        "reduce_shards", MEMORY, "misaligned address",
    ),
    Fault(
        "a unit that takes no notice of addresses", WALK,
        " | reinterpret_cast<uintptr_t>(box.base);", ";",
        "device_moves", MEMORY, "misaligned address",
    ),
    Fault(
        "a block index of 32 bits", RANDOM,
        "uint32_t(block >> 32)", "0u",
        "random", MEMORY, DIFFER,
    ),
    Fault(
        "a last stretch that no thread takes", RANDOM,
        "count + (head > 0)", "count",
        "random", MEMORY, DIFFER,
    ),
    Fault(
        "shared memory for half a row", REDUCE,
        "size_t(shared), stream}", "size_t(shared / 2), stream}",
        "reduce_shards", MEMORY, "heap-buffer-overflow",
    ),
    Fault(
        "slots for half the warps", REDUCE,
        "shared[2][kThreads / kWarp];", "shared[2][kThreads / kWarp / 2];",
        "reduce_shards", MEMORY, "global-buffer-overflow|insufficient space for an object",
    ),
    Fault(
        "more shared memory than was asked for", REDUCE,
        "if (bytes > kUnaskedBytes - kOtherSharedBytes) {", "if (bytes < 0) {",
        "reduce_shards", MEMORY, "invalid argument",
    ),
    Fault(
        "more shared memory than the GPU has", REDUCE,
        "return std::min(kMostSharedBytes, int64_t(most) - kOtherSharedBytes);",
        "return kMostSharedBytes;",
        "reduce_shards", MEMORY, "invalid argument", {"EMULATED_SHARED_BYTES": 64 << 10},
    ),
    Fault(
        "a block that takes no second row", REDUCE,
        "r < slice.rows; r += gridDim.x)", "r < slice.rows; r += slice.rows)",
        "reduce_shards", MEMORY, DIFFER,
    ),
    Fault(
        "a block of half the threads", ENTROPY,
        "launch({blocks_for(split), kThreads, 0, stream}, kernel, static_cast<T*>(gradient)",
        "launch({blocks_for(split), kThreads / 2, 0, stream}, kernel, static_cast<T*>(gradient)",
        "split_cross_entropy", MEMORY, DIFFER,
    ),
    Fault(
        "a launch of no blocks", MOVES,
        "if (all == 0) return;", "",
        "device_moves", MEMORY, "invalid argument",
    ),
    Fault(
        "another peer's slot", MOVES,
        "from.rows[blockIdx.x];", "from.rows[0];",
        "device_moves", MEMORY, DIFFER,
    ),
    Fault(
        "a row that another rank holds", EMBEDDING,
        "kRowThreads; row < window.held;", "kRowThreads; row <= window.held;",
        "masked_embedding", MEMORY, "heap-buffer-overflow",
    ),
    Fault(
        "look-ups of the padding row", EMBEDDING,
        "row < window.held && row != look_ups.padding_row ?", "row < window.held ?",
        "masked_embedding", MEMORY, DIFFER,
    ),
    Fault(
        "look-ups in the order of their list", EMBEDDING,
        "ordered[smaller] = own;", "ordered[k] = own;",
        "masked_embedding", MEMORY, DIFFER,
    ),
    Fault(
        "no barrier before lanes read the list", EMBEDDING,
        "__syncwarp();  // before lanes read what others have found", "",
        "masked_embedding", THREADS, RACE,
    ),
    Fault(
        "no barrier before bits are set in the words of other threads", EMBEDDING,
        "__syncthreads();  // before other threads set bits in these words", "",
        "masked_embedding", THREADS, RACE,
    ),
    Fault(
        "no window after the first", EMBEDDING,
        "start < look_ups.count; start", "start < kWindow; start",
        "masked_embedding", MEMORY, "AddressSanitizer",
    ),
    Fault(
        "look-ups of a long row in one place", EMBEDDING,
        "lists.placed[lists.begin[row] + lists.among[i]]", "lists.placed[lists.begin[row]]",
        "masked_embedding", MEMORY, "AddressSanitizer",
    ),
    Fault(
        "a NaN that is taken for the largest", ENTROPY,
        "if (!(seen > largest)) return;", "if (seen <= largest) return;",
        "split_cross_entropy", MEMORY, DIFFER,
    ),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.what for fault in FAULTS])
def test_a_fault_can_be_planted(fault):
    assert (CSRC / fault.file).read_text().count(fault.is_) == 1


@needs_emulator
@pytest.mark.skipif(not ALL, reason="CONSISTENT_TEST_ALL=1 compiles the kernels for each fault")
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.what for fault in FAULTS])
def test_a_planted_fault_is_found(fault, tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(CSRC, tree / CSRC.relative_to(ROOT))
    path = tree / "csrc" / fault.file
    path.write_text(path.read_text().replace(fault.is_, fault.was))
    program = build_kernels(fault.program, fault.sanitizer, tree=tree, folder=tmp_path / "made")
    cases = "once" if fault.sanitizer == THREADS else "few"  # as in test_emulated.py
    status, printed = outcome(program, cases, **fault.environment)
    assert status != 0 and re.search(fault.found, printed), printed
