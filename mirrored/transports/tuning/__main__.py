"""Command that measures and stores the timings by which transports and plans are chosen.

``torchrun --nproc_per_node 4 -m mirrored.transports.tuning`` measures which way is faster, shared
memory or messages, or the cost of messages if these ranks share no memory.
"""

from __future__ import annotations

from ..base.wrapper import Wrapper
from ..default import current


def main() -> None:
    transport = current()
    ranks = tuple(range(transport.size))
    while isinstance(transport, Wrapper):  # outermost first: GPU memory, then CPU memory
        table = transport.tune(ranks)
        if transport.rank == 0:
            print(table or f"The ranks have no {type(transport).__name__}.")
        transport = transport.inner


if __name__ == "__main__":
    main()
