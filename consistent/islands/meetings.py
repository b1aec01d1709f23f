"""Meetings: islands agree, through a store, which of them take part in an exchange of parameters.

The decision is made once and is the same for all.

```
            arrives        all arrived, or           exchange    votes on      all went well,
island 0    |------------> patience is over:         ------->    how it went   or one was lost
island 1      |----------> members are               ------->                  -> repeat without it
island 2                   0 and 1                                late: is left out
```

The first rank of an island talks to the store and passes the result to the other ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mirrored.every_rank import gather_from_ranks
from mirrored.transports.torch_dist.islands import IslandConnection, IslandPosition

T = TypeVar("T")
_PAUSE_S = 0.002


@dataclass(frozen=True)
class Attendee:
    """An island that takes part in a meeting, and the note that it passed to ``Meetings.attend``.

    A meeting is one exchange of values between islands.
    """

    island: int
    note: dict[str, Any]


class Meetings:
    """The meetings of this rank's island with other islands: exchanges of values, known by names.

    For each meeting, ``attend`` agrees with the other islands on the members, through a store that
    all islands reach, and ``hold`` runs the exchange between them.

    Args:
        between: the connection to the other islands.
        patience_s: seconds that a meeting waits for missing islands. None: it waits for the general
            time-out of ranks, and raises after it.
        name: a prefix of the store's keys, the same on all islands and different from that of other
            ``Meetings``.

    Attributes:
        sent: number of bytes that this rank has sent to other islands.
    """

    def __init__(self, between: IslandPosition, patience_s: float | None, name: str) -> None:
        self._between, self._patience = between.with_prefix(name), patience_s
        self._wait_limit_s = between.timeout_s if patience_s is None else patience_s
        self._last_members = list(range(between.count))  # the islands at the last meeting
        self._line: tuple[list[int], IslandConnection] | None = None  # connects the last members
        self._sent = 0

    @property
    def number(self) -> int:
        """The number of this rank's island."""
        return self._between.number

    @property
    def sent(self) -> int:
        return self._sent + (0 if self._line is None else self._line[1].sent)

    @property
    def count(self) -> int:
        """The number of islands, including those that are gone."""
        return self._between.count

    def attend(
        self,
        name: str,
        note: dict[str, Any],
        may_hold: Callable[[list[Attendee]], bool] = lambda attendees: True,
    ) -> list[Attendee] | None:
        """Join the meeting ``name``, and return the islands that take part, ordered by island.

        Every rank of the island must call it (a collective of the island).

        Args:
            name: the name of the meeting, the same on all islands.
            note: a dict of JSON values for the other islands.
            may_hold: (the islands that have come) -> whether they may hold the meeting. It is
                called on the first rank of one island, and all islands use its answer.

        Returns:
            the islands with their notes; None if the meeting was held without this island, or is
            not held at all.

        Raises:
            RuntimeError: an island is missing, and no patience was set.
        """
        if self._between.store is None:
            return [Attendee(0, note)]
        members = self._run_on_first_rank(lambda: self._agree_on_members(name, note, may_hold))
        if isinstance(members, str):
            raise RuntimeError(members)
        if members == []:  # not held
            # The next meeting waits only for islands that call ``request_wait``.
            self._last_members = [self._between.number]
        if not members:
            self._close_line()  # the others have opened a connection without this island
            return None
        return [Attendee(island, each) for island, each in members]

    def has_begun(self, name: str) -> bool:
        """Return whether any island has arrived at the meeting ``name``.

        A collective of the island.
        """
        store = self._between.store
        return store is not None and self._run_on_first_rank(lambda: store.check([f"{name}/begun"]))

    def request_wait(self, name: str) -> None:
        """Make the other islands wait for this one at the meeting ``name``.

        By default, they wait only for the members of their last meeting. An island that missed it
        calls this to be waited for again. A collective of the island.
        """
        key = f"{name}/wants/{self._between.number}"
        self._run_on_first_rank(lambda: self._between.store.set(key, ""))

    def is_over(self, name: str) -> bool:
        """Return whether the members of the meeting ``name`` are decided, so that none can join.

        A collective of the island.
        """
        return self._run_on_first_rank(lambda: self._between.store.check([f"{name}/members"]))

    def was_held(self, name: str) -> bool:
        """Return whether the meeting ``name`` was decided to take place, with any members.

        It reads the store without telling other ranks, so only an island's first rank may call it.
        """
        key, store = f"{name}/members", self._between.store
        if not store.check([key]) or store.check([f"{name}/void"]):
            return False
        return bool(json.loads(store.get(key)))

    def hold(
        self,
        name: str,
        attendees: list[Attendee],
        exchange: Callable[[IslandConnection, list[Attendee]], T],
        may_hold: Callable[[list[Attendee]], bool] = lambda attendees: True,
    ) -> T | None:
        """Run ``exchange`` until it succeeds on all members of the meeting, and return its result.

        If an island is lost during an attempt, the exchange runs again among the others. All ranks
        of all members call it (a collective of the islands).

        Args:
            name: the name of the meeting.
            attendees: the islands that take part, from ``attend``.
            exchange: (connection, islands) -> the result. It may be called several times, with
                fewer islands each time, so it must not change what it reads.
            may_hold: (islands) -> whether they may hold the meeting if others are lost, as in
                ``attend``.

        Returns:
            what ``exchange`` returned; None if the others have held the meeting without this
            island, because it took too long, or if those that are left may not hold it.

        Raises:
            RuntimeError: an island is lost and no patience was set, or every attempt failed.
        """
        error: RuntimeError | None = None
        attempt = failed = 0
        while failed < self._between.count:
            try:
                result = exchange(self._connect(f"{name}/{attempt}", attendees), attendees)
                error = None
            except RuntimeError as raised:
                result, error = None, raised
            if self._between.store is None:
                if error is not None:
                    raise error
                return result  # type: ignore[return-value]
            succeeded = all(gather_from_ranks(error is None))
            remaining = self._run_on_first_rank(
                lambda: self._vote(f"{name}/{attempt}", attendees, succeeded)  # noqa: B023
            )
            if remaining is None:
                self._last_members = [each.island for each in attendees]
                return result  # type: ignore[return-value]
            if self._patience is None:
                raise RuntimeError(
                    _GONE_MESSAGE.format(self._between.number, error or "")
                ) from error
            self._close_line()
            if self._between.number not in remaining:
                return None
            # Failures count from the last island that was lost: without it an exchange may succeed.
            failed = failed + 1 if len(remaining) == len(attendees) else 0
            attendees = [each for each in attendees if each.island in remaining]
            if not self._run_on_first_rank(lambda: self._may_hold(name, attendees, may_hold)):  # noqa: B023
                return None
            attempt += 1
        raise RuntimeError(
            _FAILED_MESSAGE.format(self._between.number, self._between.count)
        ) from error

    # ---- the rank that speaks for its island ----------------------------------------------------

    def _run_on_first_rank(self, call: Callable[[], T]) -> T:
        """Run ``call`` on the island's first rank, and return its result on all its ranks."""
        return gather_from_ranks(call() if self._between.place == 0 else None)[0]

    def _agree_on_members(
        self, name: str, note: dict[str, Any], may_hold: Callable[[list[Attendee]], bool]
    ) -> Any:
        """Decide with the other islands on the members of the meeting ``name``.

        This is the part of ``attend`` that an island's first rank runs.

        Returns:
            (island, note) of each member; [] if the meeting is not held; None if it was decided
            without this island; the text of an error if an island is missing.
        """
        me, store = self._between.number, self._between.store
        if store.check([f"{name}/members"]):
            return None
        # The note is stored before "members" can name this island, so every member can read it.
        store.set(f"{name}/come/{me}", json.dumps(note))
        store.set(f"{name}/begun", "")
        start = time.monotonic()
        while not store.check([f"{name}/members"]):
            arrived = [k for k in range(self._between.count) if store.check([f"{name}/come/{k}"])]
            awaited = {k for k in range(self._between.count) if store.check([f"{name}/wants/{k}"])}
            elapsed = time.monotonic() - start
            if awaited.union(self._last_members) <= set(arrived) or elapsed > self._wait_limit_s:
                missing = sorted(set(range(self._between.count)) - set(arrived))
                if missing and self._patience is None:
                    return _GONE_MESSAGE.format(me, f"Island {missing[0]} did not come.")
                # Several islands may decide at once. compare_set with an expected value of ""
                # writes only if the key does not exist, so the first decision holds for all.
                attendees = [
                    Attendee(k, json.loads(store.get(f"{name}/come/{k}"))) for k in arrived
                ]
                members = arrived if may_hold(attendees) else []
                store.compare_set(f"{name}/members", "", json.dumps(members))
            else:
                time.sleep(_PAUSE_S)
        members = json.loads(store.get(f"{name}/members"))
        if members and me not in members:
            return None
        return [(k, json.loads(store.get(f"{name}/come/{k}"))) for k in members]

    def _may_hold(
        self, name: str, attendees: list[Attendee], may_hold: Callable[[list[Attendee]], bool]
    ) -> bool:
        """Return whether the islands that are left may hold a meeting; if not, mark it as void.

        For example, a newly started island that has lost all other islands must not hold it: its
        initial parameters would become those of all islands.
        """
        if may_hold(attendees):
            return True
        self._between.store.set(f"{name}/void", "")
        return False

    def _vote(self, name: str, attendees: list[Attendee], succeeded: bool) -> list[int] | None:
        """Report whether this island's exchange succeeded, and wait for the reports of the others.

        ``hold`` calls it after each attempt, on the first rank of the island.

        Args:
            name: the name of the attempt.
            attendees: the members of the meeting.
            succeeded: whether the exchange succeeded on all ranks of this island.

        Returns:
            the islands that take part in another attempt; None if all exchanges succeeded.
        """
        me, store = self._between.number, self._between.store
        store.set(f"{name}/went/{me}", str(int(succeeded)))
        start = time.monotonic()
        while not store.check([f"{name}/result"]):
            keys = {each.island: f"{name}/went/{each.island}" for each in attendees}
            reported = [k for k, key in keys.items() if store.check([key])]
            if len(reported) == len(attendees) or time.monotonic() - start > self._wait_limit_s:
                all_succeeded = len(reported) == len(attendees) and all(
                    store.get(key) == b"1" for key in keys.values()
                )
                store.compare_set(
                    f"{name}/result", "", json.dumps(None if all_succeeded else reported)
                )
            else:
                time.sleep(_PAUSE_S)
        return json.loads(store.get(f"{name}/result"))

    # ---- connections ----------------------------------------------------------------------------

    def _connect(self, name: str, attendees: list[Attendee]) -> IslandConnection:
        """Return a connection of the ``attendees``: the open one if it connects the same islands.

        ``name`` is a prefix of the store's keys with which a new connection is set up.
        """
        members = [each.island for each in attendees]
        if self._line is None or self._line[0] != members:
            self._close_line()
            # The name holds the attempt, so a new connection never meets store keys of a failed
            # one.
            self._line = members, self._between.connect(f"{name}/line", members, self._wait_limit_s)
        return self._line[1]

    def _close_line(self) -> None:
        self._sent, self._line = self.sent, None


_GONE_MESSAGE = (
    "islands: island {} met another one that is gone, or that did not come within the time-out of "
    "islands.join. {}\n"
    "  Start the job again, from a checkpoint; or let islands be left out: "
    "islands.join(patience=...)."
)
_FAILED_MESSAGE = (
    "islands: island {} exchanged {} times with the other islands, and each time it failed on some "
    "of them, though all are still there. The last error of this island, if it had one, is the "
    "cause of this one.\n  Start the job again, from a checkpoint."
)
