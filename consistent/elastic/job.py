"""The object by which an elastic training function places, restores and keeps state (``Job``)."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mirrored.every_rank import agree, gather_from_ranks
from mirrored.transports.default import current
from mirrored.transports.torch_dist import rejoin

from .. import checkpoint
from ..spec import Placement
from .copies import Copy, PeerCopies, Version
from .fetch import CopiesReader, load, note_of
from .member import ElasticWorld, Stopped
from .recovery import Recovery, longest_times_text
from .slow import SlowRankDetector


class WorldChanges(BaseException):
    """Raised by ``Job.commit`` on all ranks when the set of ranks is to change between two steps.

    ``run`` catches it and calls the training function again on the new set. It is not an
    ``Exception``, so that a program that catches these does not stop it.
    """


class Job:
    """The object that ``run`` passes to the training function.

    The function asks it for a ``placement``, registers its objects by ``keep``, and ends each step
    by ``commit``.

    Attributes:
        step: number of finished steps: the next one is ``step + 1``.
        size: number of present ranks.
        received: bytes that this rank received from others in ``keep``.
    """

    def __init__(
        self,
        every: int,
        peers: bool,
        *,
        slow: SlowRankDetector | None = None,
        leave_out: bool = False,
        goes_on: bool = True,
    ) -> None:
        self.step = 0
        self.size = 1
        self.received = 0
        self.recovery = Recovery()  # times of this rank's last recovery
        # Without goes_on no copies are made, since nothing would ever read them.
        self._every, self._goes_on = every, goes_on
        self._slow, self._leaves_out_slow = slow, leave_out
        self._copies = PeerCopies(peers)
        self._objects: dict[str, Any] = {}
        self._is_start = True  # no rank keeps anything yet
        self._reports_sizes = False
        self._world: ElasticWorld | None = None
        self._should_leave = lambda: False  # whether the ranks are to leave the training function

    # ---- for the training function --------------------------------------------------------------

    def placement(
        self, axes: Mapping[str, int] | Sequence[str] = ("dp",), *, type: str = "cpu",
        copies: int = 2,
    ) -> Placement:  # fmt: skip
        """Return a placement of all present ranks.

        ```
        job.placement({"dp": -1, "fsdp": 2})      4 ranks: 2 x 2    3: 3 x 1    2: 2 x 1
        ```

        Args:
            axes: their names, and the number of ranks of each; -1 for one axis, which gets the
                rest. If only names are given, the first axis has all ranks.
            type: the type of the devices.
            copies: the least number of ranks on the axis with -1. The other axes are made smaller
                where they would leave fewer, as for 3 and 2 ranks above.
        """
        requested = dict(axes) if isinstance(axes, Mapping) else _default_sizes(axes)
        free_axes = [name for name, count in requested.items() if count == -1]
        if len(free_axes) != 1:
            raise ValueError(
                f"elastic: axes={requested} has {len(free_axes)} axes of -1 ranks. Give it to one: "
                "its number of ranks is what is left when a rank is lost."
            )
        sizes, remaining = {}, self.size
        for name, count in requested.items():
            if name not in free_axes:
                sizes[name] = _axis_size(remaining, count, copies)
                remaining //= sizes[name]
        sizes[free_axes[0]] = remaining
        shape = [sizes[name] for name in requested]
        return Placement(type, np.arange(self.size).reshape(shape), axes=tuple(requested))

    def keep(self, *, folder: str | os.PathLike | None = None, **objects: Any) -> dict[str, Any]:
        """Register the training's objects, and restore the last step that all ranks finished.

        A collective, called once in the training function, before its loop.

        The objects get the state that the ranks keep of that step, converted to the layouts that
        the objects have in this call. At the start of the program the objects get the state of the
        last checkpoint in ``folder``, or keep their own.

        Args:
            folder: where the program saves checkpoints, named by ``step=job.step``. They are read
                if no rank keeps a copy of what is needed.
            objects: modules, optimizers, and other objects with a ``state_dict`` (loaders,
                schedulers, scalers), as ``checkpoint.save`` takes them.

        Returns:
            The values that were passed to ``commit`` at that step.

        Raises:
            ValueError: at the start: a tensor is on one rank only, and there is no ``folder``.
            RuntimeError: the ranks that kept some tensor are lost, and there is no checkpoint.
        """
        self.recovery.end("to build the objects")
        agree(sorted(objects), _differing_names_error)
        self._objects = objects
        values = self._restore(folder)
        self._copies.prepare((self.step, self._epoch), {**objects, **values})
        if self.size > 1 and folder is None and self._is_start:
            self._check_held_twice(self._copies.prepared)
        if self._goes_on:
            rejoin.finish_on_gpu()
            gather_from_ranks(None)  # the barrier between prepare and commit (copies.py)
            self._copies.commit()
        self._copies.prepared = None
        self._reports_sizes = self._is_start
        if self._slow is not None:
            self._slow.start()
        return values

    def commit(self, **values: Any) -> None:
        """End a step: all ranks wait for each other, and copy their shards. A collective.

        If a rank is lost later, the other ranks continue from these copies. If ranks are to join or
        to be left out, ``commit`` does not return, but ends the call of the training function.

        Args:
            values: what ``keep`` returns if the training continues after this step, such as a list
                of losses: numbers, texts, tensors, and lists and dictionaries of them.
        """
        self.step += 1
        if self.step % self._every or not (self._goes_on or self._slow):
            return
        note = (b"1" if self._should_leave() else b"0") + (self._slow.note() if self._slow else b"")
        if self._goes_on:
            self._copies.prepare((self.step, self._epoch), {**self._objects, **values})
            rejoin.finish_on_gpu()
        # This is also the barrier between prepare and commit (copies.py).
        notes = current().gather_notes(note, tuple(range(self.size)))
        if self._goes_on:
            self._copies.commit()
            self._report_sizes(self._copies.last_copy)
        changes = any(each[:1] == b"1" for each in notes)
        if self._slow is not None:
            changes = self._report_slow_ranks([each[1:] for each in notes]) or changes
            self._slow.start()
        if changes:
            checkpoint.wait()  # a new rank could not take part in the end of a running save
            raise WorldChanges

    def _report_slow_ranks(self, notes: list[bytes]) -> bool:
        """Print slow ranks, and return whether the other ranks are to continue without them.

        Args:
            notes: the seconds that each rank has worked in this step, as ``SlowRankDetector.note``
                packs them. All ranks have the same notes, so the result is the same on all.

        Raises:
            Stopped: this rank is slow, and the others continue without it.
        """
        assert self._slow is not None
        slow_ranks = self._slow.find_slow_ranks(notes)
        leave_out = bool(slow_ranks) and self._leaves_out_slow and self._goes_on
        for text in slow_ranks.values() if current().rank == 0 else ():
            suffix = ", and is left out" if leave_out else ""
            print(f"elastic: {text}{suffix}.", file=sys.stderr, flush=True)
        if leave_out and current().rank in slow_ranks:
            checkpoint.wait()
            raise Stopped(f"elastic: {slow_ranks[current().rank]}, so the others go on without it.")
        return leave_out

    # ---- for run --------------------------------------------------------------------------------

    def begin(self, world: ElasticWorld | None, changes: Any) -> None:
        """Prepare for a call of the training function in a new set of ranks; a collective of them.

        Args:
            world: the set of ranks; None if ``consistent run`` did not start them.
            changes: () -> whether the ranks are to leave the training function.
        """
        self._world, self._should_leave = world, changes
        self.size = current().size
        self._objects = {}
        last_copy = self._copies.last_copy
        versions: list[Version | None] = gather_from_ranks(
            None if last_copy is None else last_copy.version
        )
        self._copies.settle(versions)
        if self._slow is not None:
            self._slow.begin()

    @property
    def _epoch(self) -> int:
        return 0 if self._world is None else self._world.epoch

    def _restore(self, folder: str | os.PathLike | None) -> dict[str, Any]:
        """Restore the registered objects from copies, or from a checkpoint in ``folder``.

        Returns:
            the values that were kept with the state.
        """
        notes = gather_from_ranks(note_of(self._copies.last_copy))
        kept_steps = {note.version for note in notes if note is not None}
        assert len(kept_steps) < 2, f"ranks keep different steps: {kept_steps}"  # see ``settle``
        step = next((step for step, _ in kept_steps), None)
        self._is_start = step is None
        if step is not None:
            reader = CopiesReader(notes, self._copies.last_copy)
            if not reader.missing:
                values = load(reader, self._objects)
                self.step = step
                self.received = reader.received
                self.recovery.end("to fill them")
                times = longest_times_text(gather_from_ranks(self.recovery.seconds))
                self._print_status(f"goes on after step {step}", reader.received, f"; {times}")
                return values
        else:
            reader = None
        path = None if folder is None else checkpoint.latest(folder)
        if path is None:
            if reader is None:
                if self._epoch > 1:
                    self._print_status("no rank that kept a step is left; begins with step 1")
                self.step = 0
                return {}
            raise _all_lost_error(reader.missing, folder)
        values = checkpoint.load(path, **self._objects)
        self.step = int(values.pop("step", 0))
        if reader is not None:
            again = f"steps {self.step + 1} to {step} run again" if step != self.step else "goes on"
            self._print_status(
                f"ranks that kept {_shortened_list(reader.missing)} are lost; {again}, from {path}"
            )
        return values

    def _check_held_twice(self, prepared: Copy | None) -> None:
        """Raise if some part of a tensor is on one rank only, and would be lost with it.

        A collective, at the start of a job that has no checkpoints.

        Args:
            prepared: what this rank would keep.

        Raises:
            ValueError: the message names the tensors that one rank alone holds.
        """
        note = note_of(prepared)
        assert note is not None
        notes = gather_from_ranks([*note.pieces, *note.peer_pieces])
        count = Counter((piece.name, piece.box) for pieces in notes for piece in pieces)
        held_once = sorted({name for (name, _), n in count.items() if n < 2})
        if held_once:
            raise ValueError(
                f"elastic: {_shortened_list(held_once)} would be lost with one rank, since no "
                "other one holds the same part, and there is no checkpoint to go back to.\n"
                '  Lay them twice, by another axis with plan "data": job.placement({"dp": -1, '
                '"fsdp": 2}) with plan={"dp": "data", "fsdp": "zero3"};\n'
                "  or let ranks keep each other's parts: elastic.run(train, peers=True);\n"
                "  or save checkpoints, and give their folder: job.keep(folder=...)."
            )

    def _report_sizes(self, last_copy: Copy | None) -> None:
        """Print what copies cost in memory and messages, after the job's first step.

        A collective.
        """
        if not self._reports_sizes:
            return
        self._reports_sizes = False
        assert last_copy is not None
        own_bytes, peer_bytes = map(max, zip(*gather_from_ranks(last_copy.nbytes()), strict=True))
        sent = (
            f", and {peer_bytes:,} of the rank before, which are sent to it" if peer_bytes else ""
        )
        often = "each step" if self._every == 1 else f"every {self._every} steps"
        if current().rank == 0:
            line = (
                f"elastic: {often} a rank copies up to {own_bytes:,} bytes of its own state{sent}."
            )
            print(line, file=sys.stderr, flush=True)

    def _print_status(self, text: str, received: int = 0, more: str = "") -> None:
        """Print a line about this job on rank 0, with the sum over ranks of ``received`` bytes."""
        received = sum(gather_from_ranks(received))
        if current().rank == 0:
            sent = f"; {received:,} bytes came from other ranks" if received else ""
            line = f"elastic: {text}, on {self.size} ranks{sent}{more}."
            print(line, file=sys.stderr, flush=True)


def _default_sizes(names: Sequence[str]) -> dict[str, int]:
    """Return the axes for names alone: ``("dp", "tp") -> {"dp": -1, "tp": 1}``."""
    return {name: 1 if k else -1 for k, name in enumerate(names)}


def _axis_size(ranks: int, requested: int, copies: int) -> int:
    """Return a size for an axis that leaves at least ``copies`` ranks for the axis given as -1.

    The size is the largest number up to ``requested`` that divides ``ranks`` with a quotient of at
    least ``copies``, or else 1: ``_axis_size(4, 2, 2) -> 2``, ``_axis_size(3, 2, 2) -> 1``.
    """
    fits = [
        n for n in range(1, min(requested, ranks) + 1) if ranks % n == 0 and ranks // n >= copies
    ]
    return max(fits, default=1)


def _all_lost_error(missing: Any, folder: str | os.PathLike | None) -> RuntimeError:
    """Return the error for tensors that no present rank keeps, without a checkpoint to load."""
    why = "no folder of checkpoints was given" if folder is None else "there is no checkpoint"
    return RuntimeError(
        f"elastic: the ranks that kept {_shortened_list(missing)} are lost together, and {why}. "
        "Let each tensor lie on more ranks, or save checkpoints and give keep(folder=...)."
    )


def _shortened_list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _differing_names_error(notes: list[list[str]]) -> Exception:
    return ValueError(
        "elastic: ranks keep other objects: "
        + "; ".join(f"rank {r}: {', '.join(names)}" for r, names in enumerate(notes))
        + ". Call job.keep alike on every rank."
    )
