"""Capture of device work by ``torch.cuda.CUDAGraph``.

This follows the rules of https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs: work is
captured on a separate stream after a warm-up; graphs of one pool are replayed in the order of their
capture, and never concurrently; memory that a graph reads or writes stays allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class CudaGraphs:
    """Capturer of CUDA graphs, which share one private memory pool."""

    device = "cuda"

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    @staticmethod
    def why_not() -> str:
        """Return the reason why this process cannot capture CUDA graphs; "" if it can."""
        return "" if torch.cuda.is_available() else "torch finds no CUDA device here"

    def warm_up(self, run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Run ``run`` without capture, on the stream that will capture it later.

        Libraries create handles and workspaces for each stream, which must exist before the
        capture.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            results = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        for x in results:
            if x.is_cuda:
                # The results were allocated on the capture stream and are read on the current
                # stream.
                x.record_stream(torch.cuda.current_stream())
        return results

    def capture(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], list]:
        """Return (a function that replays ``run``, the results that every replay writes).

        Nothing is computed until the first replay. Other threads, such as the NCCL watchdog, may
        call CUDA during the capture.
        """
        graph = torch.cuda.CUDAGraph()
        options = {"pool": self._pool, "stream": self._stream}
        with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
            results = list(run())
        return graph.replay, results
