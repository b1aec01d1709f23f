"""The rules by which the leader decides which processes are ranks of the next world.

A world is a set of ranks that train together. The leader decides from the messages of processes
("rank" below) and of their launchers ("agent"); on the right are its answers.

```
rank      "here"    it waits for a world                    --->  "world"  its rank in the next one
          "done"    its program is over                           "lost"   a member is gone: give up
agent     "began", "ended"   a process of its host                "change" leave after this step
          "beat"    it lives                                      "over"   the program is over
                                                                  "stop"   end, and say why
                                                            --->  agent: "kill", "start", "finish"
```

The next world is formed after a member (a rank of the present world) has given up the step, or has
left the world between two steps, and waits for the next one. By then all living members must be
waiting. A member that is suspended or does not come in time is killed first, so that no process
still acts as a rank of the previous world. A process that cannot reach the leader is in no world
that is formed from then on.

Nothing here communicates or reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import mail

Message = tuple[str, dict[str, Any]]  # the queue, and what is said

SILENT_S = 5.0  # seconds without a beat after which a host is gone
GATHERING_S = 5.0  # seconds for which processes that are being started are waited for


@dataclass
class Worker:
    """A process that is a rank, or waits to become one.

    Attributes:
        agent: number of the launcher (one for each host) that started it.
        pid: its process id on that host.
        facts: versions and checksums that must be equal for all; None until it has reported them.
        here_since: since when it waits for a world; None if it does not.
        order: counts processes as they came.
        done: whether it has finished the program.
    """

    agent: int
    pid: int = 0
    facts: dict[str, str] | None = None  # what must be equal for all
    here_since: float | None = None  # since when it waits for a world; None if it does not
    order: int = 0  # counts processes as they came
    done: bool = False


@dataclass
class Membership:
    """State of the leader's decision about which processes are ranks, and the rules to change it.

    A world is a set of ranks that train together, and its members are the processes in it.

    Args:
        least, most: smallest and largest number of ranks; fewer than ``least`` do not continue.
        patience_s: how long a member may take until it waits for the next world, once another
            member waits for it.
        restarts: how many processes are started in place of lost ones.
        hosts: the least number of hosts with ranks in the first world.
    """

    least: int
    most: int
    patience_s: float
    restarts: int = 0
    hosts: int = 1
    epoch: int = 0
    members: list[str] = field(default_factory=list)  # of the world, in order of rank
    workers: dict[str, Worker] = field(default_factory=dict)  # that live
    beats: dict[int, float] = field(default_factory=dict)  # agent -> when heard last; -1: given up
    log: list[str] = field(default_factory=list)  # what is to be printed
    code: int | None = None  # the exit status, once all is over
    _gone: list[str] = field(default_factory=list)  # of the last world, as text
    _asked: set[str] = field(default_factory=set)  # members that were asked to leave the world
    _looked: bool = False  # whether agents were told to kill suspended members
    _over: bool = False  # whether a member is done
    _finished: bool = False  # whether the agents have been told that all is over
    _came: int = 0  # number of processes that have been started so far
    _heard: float | None = None  # when the last message came

    def hear(self, said: dict[str, Any], now: float) -> list[Message]:
        """Process one message, and return the messages to send in response.

        The leader's thread calls it; the class itself sends nothing.

        Args:
            said: the message of a process or of an agent (the launcher of a host).
            now: the time in seconds, from any fixed start.
        """
        out: list[Message] = []
        self._excuse(now)
        if "agent" in said:
            # A negative beat marks a host that was given up; it may not come back.
            if self.beats.get(said["agent"], now) < 0:
                return [(mail.agent(said["agent"]), {"is": "finish", "code": 1, "why": _CUT_OFF})]
            self.beats[said["agent"]] = now
        kind, name = said["is"], said.get("name", "")
        if kind == "began":
            self._came += 1
            self.workers[name] = Worker(said["agent"], said["pid"], order=self._came)
        elif kind == "ended" and name in self.workers:
            out += self._end(name, said["how"])
        elif kind == "here":
            out += self._is_here(name, said["facts"], now)
        elif kind == "done" and name in self.workers:
            self.workers[name].done = self._over = True
        return out + self._silent(now) + self._next(now)

    def _excuse(self, now: float) -> None:
        """Extend the deadlines of all hosts by the time in which this process itself was suspended.

        Agents (the launchers of hosts) send a message twice a second. If none came for much longer,
        this process did not read them, and no host is to be given up for that.
        """
        gap = 0.0 if self._heard is None else now - self._heard
        self._heard = now
        if gap > SILENT_S / 2:
            self.beats = {k: beat if beat < 0 else beat + gap for k, beat in self.beats.items()}

    # ---- processes ------------------------------------------------------------------------------

    def _is_here(self, name: str, facts: dict[str, str], now: float) -> list[Message]:
        """Record that a process waits for a world.

        The process is told to stop if its versions or code differ from those of the other
        processes, or if its host was given up.
        """
        if name not in self.workers:
            return [(mail.worker(name), {"is": "stop", "words": _CUT_OFF})]
        known = next((w.facts for w in self.workers.values() if w.facts is not None), facts)
        if facts != known:
            differ = [key for key in known if facts.get(key) != known[key]]
            told = "; ".join(f"{key} {facts.get(key)!r} and not {known[key]!r}" for key in differ)
            words = (
                f"elastic: a process that came later has {told}. All ranks must run the same code "
                "and releases. Start it with those of the ranks that run."
            )
            return [(mail.worker(name), {"is": "stop", "words": words})]
        self.workers[name].facts, self.workers[name].here_since = facts, now
        return []

    def _end(self, name: str, how: str) -> list[Message]:
        """Remove a process that has ended, and tell the other members that their world is over.

        Args:
            name: the name of the process.
            how: how it has ended, as a phrase such as ``was ended by SIGKILL``.
        """
        gone = self.workers.pop(name)
        if gone.done or self.code is not None:
            return []
        out: list[Message] = []
        if name in self.members:
            rank = self.members.index(name)
            self._gone.append(f"rank {rank} (process {gone.pid}) {how}")
            self.log.append(f"elastic: {self._gone[-1]}.")
            lost = {"is": "lost", "epoch": self.epoch, "words": _LOST.format(self._gone[-1])}
            # Members that wait have given up the step already.
            out += [(mail.worker(each), lost) for each in self._left() if not self._waits(each)]
        if self.restarts > 0:
            self.restarts -= 1
            out.append((mail.agent(gone.agent), {"is": "start"}))
        return out

    def _silent(self, now: float) -> list[Message]:
        """Give up hosts that were silent for ``SILENT_S`` seconds.

        Their processes count as ended, which the other members of the world are told.
        """
        out: list[Message] = []
        for number, beat in list(self.beats.items()):
            if 0 <= beat < now - SILENT_S:
                self.beats[number] = -1.0
                for name in [n for n, w in self.workers.items() if w.agent == number]:
                    out += self._end(name, f"is on a host that has been silent for {SILENT_S} s")
        return out

    def _left(self) -> list[str]:
        """Return the members of the present world that live and have not finished the program."""
        return [n for n in self.members if n in self.workers and not self.workers[n].done]

    def _waits(self, name: str) -> bool:
        return self.workers[name].here_since is not None

    # ---- worlds ---------------------------------------------------------------------------------

    def _next(self, now: float) -> list[Message]:
        """Return the messages that form the next world, or that make processes ready for it.

        Depending on which processes wait: form the next world, ask the members of the present world
        to leave it, hurry the members that have not left yet, or end the program.
        """
        if not self.workers:
            return self._finish()
        if self.code is not None:
            return []
        waiting = [name for name in self.workers if self._waits(name)]
        if not waiting:
            return []
        if self._over:
            return self._tell_over(waiting)
        left = self._left()
        absent = [name for name in left if not self._waits(name)]
        if not left:
            return self._first(waiting, now)
        if len(absent) == len(left):
            return self._ask_out(left, waiting, now)
        if absent:
            return self._hurry(absent, min(self._since(n) for n in left if self._waits(n)), now)
        return self._form(waiting)

    def _tell_over(self, waiting: list[str]) -> list[Message]:
        """Return messages that tell the waiting processes that the program is over.

        A member reports "done" only after all have reached the end, so a waiting process either has
        its result, or is a newcomer.
        """
        for name in waiting:
            self.workers[name].here_since, self.workers[name].done = None, True
        return [(mail.worker(name), {"is": "over"}) for name in waiting]

    def _since(self, name: str) -> float:
        since = self.workers[name].here_since
        assert since is not None
        return since

    def _first(self, waiting: list[str], now: float) -> list[Message]:
        """Form a world of new processes only, once enough of them wait.

        Called for the first world, and after all members of the present world are lost.
        """
        late = now - max(map(self._since, waiting)) > GATHERING_S
        whole = len(waiting) == self.most if not self.epoch else len(waiting) == len(self.workers)
        from_all = self.epoch or len({self.workers[n].agent for n in waiting}) >= self.hosts
        enough = len(waiting) >= self.least and late and from_all
        return self._form(waiting) if whole or enough else []

    def _ask_out(self, left: list[str], waiting: list[str], now: float) -> list[Message]:
        """Ask the members to leave their world after this step, because new processes wait to join.

        First it waits up to ``GATHERING_S`` seconds for processes that are being started, since
        each change of worlds stops the training.

        Args:
            left: the members that live.
            waiting: the processes that wait.
            now: the present time.
        """
        late = now - min(map(self._since, waiting)) > GATHERING_S
        if not late and len(self.workers) > len(left) + len(waiting):
            return []
        new = [name for name in left if name not in self._asked]
        self._asked.update(new)
        return [(mail.worker(name), {"is": "change", "epoch": self.epoch}) for name in new]

    def _hurry(self, absent: list[str], since: float, now: float) -> list[Message]:
        """Return messages that make the members ``absent`` leave their world; other members wait.

        Of the absent members, suspended ones are killed at once, and all after ``patience_s``
        seconds.

        Args:
            absent: the names of the members that do not wait for the next world yet.
            since: when the first member began to wait.
            now: the present time.
        """
        if now - since > self.patience_s:
            return [self._to_agent(name, {"is": "kill", "name": name}) for name in absent]
        if self._looked:
            return []
        self._looked = True
        told = [self._to_agent(name, {"is": "kill if stopped", "name": name}) for name in absent]
        lost = {"is": "lost", "epoch": self.epoch, "words": _LOST.format("a rank has given up")}
        return told + [(mail.worker(name), lost) for name in absent]

    def _to_agent(self, name: str, message: dict[str, Any]) -> Message:
        return mail.agent(self.workers[name].agent), message

    def _form(self, waiting: list[str]) -> list[Message]:
        """Make the waiting processes the members of a new world, and tell each its rank.

        If they are fewer than ``least``, they are stopped instead.
        """
        if len(waiting) < self.least:
            words = (
                f"elastic: {len(waiting)} ranks are left, and at least {self.least} are to go on. "
                "Start more, or give a smaller --least."
            )
            self.code = 1
            self.log.append(words)
            return [(mail.worker(name), {"is": "stop", "words": words}) for name in waiting]
        before = {name: rank for rank, name in enumerate(self.members)}
        far = len(before)
        # Ranks of a host are consecutive, as placements assume.
        waiting.sort(
            key=lambda n: (self.workers[n].agent, before.get(n, far), self.workers[n].order)
        )
        came = [rank for rank, name in enumerate(waiting) if name not in before]
        if self.epoch:
            changes = [f"{len(came)} came"] * bool(came)
            self.log.append("elastic: " + ", ".join([f"{len(waiting)} ranks go on", *changes]))
        gone, self._gone = self._gone, []
        self.epoch += 1
        self.members, self._asked, self._looked = list(waiting), set(), False
        for name in waiting:
            self.workers[name].here_since = None
        world = {"is": "world", "epoch": self.epoch, "size": len(waiting), "gone": gone}
        world["came"] = came
        return [(mail.worker(name), {**world, "rank": rank}) for rank, name in enumerate(waiting)]

    def _finish(self) -> list[Message]:
        """Tell the agents to end with the program's status, after all processes have ended."""
        if not self._came or self._finished:
            return []
        self._finished = True
        if self.code is None:
            self.code = 0 if self._over and not self._gone else 1
        return [
            (mail.agent(number), {"is": "finish", "code": self.code, "why": ""})
            for number, beat in self.beats.items()
            if beat >= 0
        ]


_LOST = (
    "{}, so every rank gives up this step.\n"
    "  Under consistent.elastic.run the ranks that are left go on by themselves, if the program "
    "lets this error out of the function that it gave there."
)
_CUT_OFF = (
    "elastic: this host was out of reach of the one that holds the store, where the others go on "
    "without it. Only the store's side goes on, so this one ends."
)
