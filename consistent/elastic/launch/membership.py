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

SILENCE_LIMIT_S = 5.0  # seconds without a beat after which a host is gone
GATHER_WAIT_S = 5.0  # seconds for which processes that are being started are waited for


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
    # agent -> when heard last; -1: given up
    last_heartbeats: dict[int, float] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)  # what is to be printed
    code: int | None = None  # the exit status, once all is over
    _losses: list[str] = field(default_factory=list)  # of the last world, as text
    # Members that were asked to leave the world.
    _asked_to_leave: set[str] = field(default_factory=set)
    _has_killed_suspended: bool = False  # whether agents were told to kill suspended members
    _is_over: bool = False  # whether a member is done
    _finish_sent: bool = False  # whether the agents have been told that all is over
    _process_count: int = 0  # number of processes that have been started so far
    _last_message_at: float | None = None  # when the last message came

    def handle(self, message: dict[str, Any], now: float) -> list[Message]:
        """Process one message, and return the messages to send in response.

        The leader's thread calls it; the class itself sends nothing.

        Args:
            message: the message of a process or of an agent (the launcher of a host).
            now: the time in seconds, from any fixed start.
        """
        out: list[Message] = []
        self._extend_deadlines(now)
        if "agent" in message:
            # A negative beat marks a host that was given up; it may not come back.
            if self.last_heartbeats.get(message["agent"], now) < 0:
                return [
                    (
                        mail.agent_queue(message["agent"]),
                        {"is": "finish", "code": 1, "why": _CUT_OFF_TEXT},
                    )
                ]
            self.last_heartbeats[message["agent"]] = now
        kind, name = message["is"], message.get("name", "")
        if kind == "began":
            self._process_count += 1
            self.workers[name] = Worker(message["agent"], message["pid"], order=self._process_count)
        elif kind == "ended" and name in self.workers:
            out += self._remove_process(name, message["how"])
        elif kind == "here":
            out += self._record_waiting(name, message["facts"], now)
        elif kind == "done" and name in self.workers:
            self.workers[name].done = self._is_over = True
        return out + self._give_up_silent_hosts(now) + self._next_world_messages(now)

    def _extend_deadlines(self, now: float) -> None:
        """Extend the deadlines of all hosts by the time in which this process itself was suspended.

        Agents (the launchers of hosts) send a message twice a second. If none came for much longer,
        this process did not read them, and no host is to be given up for that.
        """
        gap = 0.0 if self._last_message_at is None else now - self._last_message_at
        self._last_message_at = now
        if gap > SILENCE_LIMIT_S / 2:
            self.last_heartbeats = {
                k: beat if beat < 0 else beat + gap for k, beat in self.last_heartbeats.items()
            }

    # ---- processes ------------------------------------------------------------------------------

    def _record_waiting(self, name: str, facts: dict[str, str], now: float) -> list[Message]:
        """Record that a process waits for a world.

        The process is told to stop if its versions or code differ from those of the other
        processes, or if its host was given up.
        """
        if name not in self.workers:
            return [(mail.worker_queue(name), {"is": "stop", "words": _CUT_OFF_TEXT})]
        known_facts = next((w.facts for w in self.workers.values() if w.facts is not None), facts)
        if facts != known_facts:
            differ = [key for key in known_facts if facts.get(key) != known_facts[key]]
            differences = "; ".join(
                f"{key} {facts.get(key)!r} and not {known_facts[key]!r}" for key in differ
            )
            text = (
                f"elastic: a process that came later has {differences}. All ranks must run the "
                "same code and releases. Start it with those of the ranks that run."
            )
            return [(mail.worker_queue(name), {"is": "stop", "words": text})]
        self.workers[name].facts, self.workers[name].here_since = facts, now
        return []

    def _remove_process(self, name: str, how: str) -> list[Message]:
        """Remove a process that has ended, and tell the other members that their world is over.

        Args:
            name: the name of the process.
            how: how it has ended, as a phrase such as ``was ended by SIGKILL``.
        """
        process = self.workers.pop(name)
        if process.done or self.code is not None:
            return []
        out: list[Message] = []
        if name in self.members:
            rank = self.members.index(name)
            self._losses.append(f"rank {rank} (process {process.pid}) {how}")
            self.log.append(f"elastic: {self._losses[-1]}.")
            lost = {"is": "lost", "epoch": self.epoch, "words": _LOST_TEXT.format(self._losses[-1])}
            # Members that wait have given up the step already.
            out += [
                (mail.worker_queue(each), lost)
                for each in self._living_members()
                if not self._is_waiting(each)
            ]
        if self.restarts > 0:
            self.restarts -= 1
            out.append((mail.agent_queue(process.agent), {"is": "start"}))
        return out

    def _give_up_silent_hosts(self, now: float) -> list[Message]:
        """Give up hosts that were silent for ``SILENCE_LIMIT_S`` seconds.

        Their processes count as ended, which the other members of the world are told.
        """
        out: list[Message] = []
        for number, beat in list(self.last_heartbeats.items()):
            if 0 <= beat < now - SILENCE_LIMIT_S:
                self.last_heartbeats[number] = -1.0
                for name in [n for n, w in self.workers.items() if w.agent == number]:
                    out += self._remove_process(
                        name, f"is on a host that has been silent for {SILENCE_LIMIT_S} s"
                    )
        return out

    def _living_members(self) -> list[str]:
        """Return the members of the present world that live and have not finished the program."""
        return [n for n in self.members if n in self.workers and not self.workers[n].done]

    def _is_waiting(self, name: str) -> bool:
        return self.workers[name].here_since is not None

    # ---- worlds ---------------------------------------------------------------------------------

    def _next_world_messages(self, now: float) -> list[Message]:
        """Return the messages that form the next world, or that make processes ready for it.

        Depending on which processes wait: form the next world, ask the members of the present world
        to leave it, hurry the members that have not left yet, or end the program.
        """
        if not self.workers:
            return self._finish_agents()
        if self.code is not None:
            return []
        waiting = [name for name in self.workers if self._is_waiting(name)]
        if not waiting:
            return []
        if self._is_over:
            return self._over_messages(waiting)
        living = self._living_members()
        absent = [name for name in living if not self._is_waiting(name)]
        if not living:
            return self._form_new_world(waiting, now)
        if len(absent) == len(living):
            return self._ask_members_to_leave(living, waiting, now)
        if absent:
            return self._force_absent_to_leave(
                absent, min(self._waiting_since(n) for n in living if self._is_waiting(n)), now
            )
        return self._form_world(waiting)

    def _over_messages(self, waiting: list[str]) -> list[Message]:
        """Return messages that tell the waiting processes that the program is over.

        A member reports "done" only after all have reached the end, so a waiting process either has
        its result, or is a newcomer.
        """
        for name in waiting:
            self.workers[name].here_since, self.workers[name].done = None, True
        return [(mail.worker_queue(name), {"is": "over"}) for name in waiting]

    def _waiting_since(self, name: str) -> float:
        since = self.workers[name].here_since
        assert since is not None
        return since

    def _form_new_world(self, waiting: list[str], now: float) -> list[Message]:
        """Form a world of new processes only, once enough of them wait.

        Called for the first world, and after all members of the present world are lost.
        """
        is_late = now - max(map(self._waiting_since, waiting)) > GATHER_WAIT_S
        is_complete = (
            len(waiting) == self.most if not self.epoch else len(waiting) == len(self.workers)
        )
        has_all_hosts = self.epoch or len({self.workers[n].agent for n in waiting}) >= self.hosts
        is_enough = len(waiting) >= self.least and is_late and has_all_hosts
        return self._form_world(waiting) if is_complete or is_enough else []

    def _ask_members_to_leave(
        self, living: list[str], waiting: list[str], now: float
    ) -> list[Message]:
        """Ask the members to leave their world after this step, because new processes wait to join.

        First it waits up to ``GATHER_WAIT_S`` seconds for processes that are being started, since
        each change of worlds stops the training.

        Args:
            living: the members that live.
            waiting: the processes that wait.
            now: the present time.
        """
        is_late = now - min(map(self._waiting_since, waiting)) > GATHER_WAIT_S
        if not is_late and len(self.workers) > len(living) + len(waiting):
            return []
        not_asked = [name for name in living if name not in self._asked_to_leave]
        self._asked_to_leave.update(not_asked)
        return [
            (mail.worker_queue(name), {"is": "change", "epoch": self.epoch}) for name in not_asked
        ]

    def _force_absent_to_leave(self, absent: list[str], since: float, now: float) -> list[Message]:
        """Return messages that make the members ``absent`` leave their world; other members wait.

        Of the absent members, suspended ones are killed at once, and all after ``patience_s``
        seconds.

        Args:
            absent: the names of the members that do not wait for the next world yet.
            since: when the first member began to wait.
            now: the present time.
        """
        if now - since > self.patience_s:
            return [self._message_to_agent(name, {"is": "kill", "name": name}) for name in absent]
        if self._has_killed_suspended:
            return []
        self._has_killed_suspended = True
        kills = [
            self._message_to_agent(name, {"is": "kill if stopped", "name": name}) for name in absent
        ]
        lost = {
            "is": "lost",
            "epoch": self.epoch,
            "words": _LOST_TEXT.format("a rank has given up"),
        }
        return kills + [(mail.worker_queue(name), lost) for name in absent]

    def _message_to_agent(self, name: str, message: dict[str, Any]) -> Message:
        return mail.agent_queue(self.workers[name].agent), message

    def _form_world(self, waiting: list[str]) -> list[Message]:
        """Make the waiting processes the members of a new world, and tell each its rank.

        If they are fewer than ``least``, they are stopped instead.
        """
        if len(waiting) < self.least:
            text = (
                f"elastic: {len(waiting)} ranks are left, and at least {self.least} are to go on. "
                "Start more, or give a smaller --least."
            )
            self.code = 1
            self.log.append(text)
            return [(mail.worker_queue(name), {"is": "stop", "words": text}) for name in waiting]
        old_ranks = {name: rank for rank, name in enumerate(self.members)}
        far = len(old_ranks)
        # Ranks of a host are consecutive, as placements assume.
        waiting.sort(
            key=lambda n: (self.workers[n].agent, old_ranks.get(n, far), self.workers[n].order)
        )
        new_ranks = [rank for rank, name in enumerate(waiting) if name not in old_ranks]
        if self.epoch:
            changes = [f"{len(new_ranks)} came"] * bool(new_ranks)
            self.log.append("elastic: " + ", ".join([f"{len(waiting)} ranks go on", *changes]))
        losses, self._losses = self._losses, []
        self.epoch += 1
        self.members, self._asked_to_leave, self._has_killed_suspended = list(waiting), set(), False
        for name in waiting:
            self.workers[name].here_since = None
        world = {"is": "world", "epoch": self.epoch, "size": len(waiting), "gone": losses}
        world["came"] = new_ranks
        return [
            (mail.worker_queue(name), {**world, "rank": rank}) for rank, name in enumerate(waiting)
        ]

    def _finish_agents(self) -> list[Message]:
        """Tell the agents to end with the program's status, after all processes have ended."""
        if not self._process_count or self._finish_sent:
            return []
        self._finish_sent = True
        if self.code is None:
            self.code = 0 if self._is_over and not self._losses else 1
        return [
            (mail.agent_queue(number), {"is": "finish", "code": self.code, "why": ""})
            for number, beat in self.last_heartbeats.items()
            if beat >= 0
        ]


_LOST_TEXT = (
    "{}, so every rank gives up this step.\n"
    "  Under consistent.elastic.run the ranks that are left go on by themselves, if the program "
    "lets this error out of the function that it gave there."
)
_CUT_OFF_TEXT = (
    "elastic: this host was out of reach of the one that holds the store, where the others go on "
    "without it. Only the store's side goes on, so this one ends."
)
