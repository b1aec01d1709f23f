"""Capture as torch.cuda.CUDAGraph.

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs has the rules that are kept here:
work is captured on a stream of its own after a warm-up; graphs of one pool are replayed in the
order in which they were captured, and never at once; memory that a graph reads or writes stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class CudaGraphs:
    """Graphs that share one private pool of memory."""

    device = "cuda"

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    @staticmethod
    def why_not() -> str:
        """Why this process cannot capture; "" if it can."""
        return "" if torch.cuda.is_available() else "torch finds no CUDA device here"

    def warm_up(self, run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Run it as it is, on the stream on which it is captured later: libraries make their
        handles and work spaces for each stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            made = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        for x in made:
            if x.is_cuda:
                x.record_stream(torch.cuda.current_stream())
        return made

    def capture(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], list]:
        """(what replays it, its results, which every replay writes). Nothing is computed yet.

        Other threads, such as the one that watches NCCL, may call CUDA meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        how = {"pool": self._pool, "stream": self._stream}
        with torch.cuda.graph(graph, capture_error_mode="thread_local", **how):
            made = list(run())
        return graph.replay, made
