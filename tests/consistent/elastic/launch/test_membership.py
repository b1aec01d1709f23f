"""Who is in the next world, by what is said: no process, no store and no clock."""

from __future__ import annotations

from typing import Any

from consistent.elastic.launch.membership import GATHER_WAIT_S, SILENCE_LIMIT_S, Membership

FACTS = {"torch": "2.13.0", "the program": "1234"}


class Script:
    """Says things to a `Membership` and keeps what it says."""

    def __init__(self, **options: Any) -> None:
        self.rules = Membership(**{"least": 1, "most": 3, "patience_s": 10.0, **options})
        self.now, self.out = 0.0, []

    def say(self, kind: str, **more: Any) -> list[tuple[str, dict[str, Any]]]:
        self.out = self.rules.handle({"is": kind, **more}, self.now)
        return self.out

    def here(self, name: str, facts: dict[str, str] = FACTS) -> list[tuple[str, dict[str, Any]]]:
        return self.say("here", name=name, facts=facts)

    def began(self, *names: str, agent: int = 0) -> None:
        for name in names:
            self.say("began", agent=agent, name=name, pid=7)

    def world(self) -> dict[str, tuple[int, int]]:
        """name -> (rank, size), of the worlds that were just told."""
        told = [(to, m) for to, m in self.out if m["is"] == "world"]
        return {to.removeprefix("worker/"): (m["rank"], m["size"]) for to, m in told}

    def kinds(self) -> set[tuple[str, str]]:
        return {(to, message["is"]) for to, message in self.out}


def started(**options: Any) -> Script:
    script = Script(**options)
    script.began("a", "b", "c")
    for name in "abc":
        script.here(name)
    return script


def test_the_first_world_begins_when_all_are_here():
    script = Script()
    script.began("a", "b", "c")
    assert script.here("a") == [] and script.here("b") == []
    script.here("c")
    assert script.world() == {"a": (0, 3), "b": (1, 3), "c": (2, 3)}


def test_the_first_world_waits_for_hosts_and_later_ones_do_without():
    script = Script(hosts=2, most=2)
    script.began("a")
    script.here("a")
    script.now = 60.0
    script.say("beat", agent=0)
    assert script.world() == {}
    script.began("b", agent=1)
    script.here("b")
    assert script.world() == {"a": (0, 2), "b": (1, 2)}
    script.say("ended", agent=1, name="b", how="was ended by SIGKILL")
    script.here("a")
    assert script.world() == {"a": (0, 1)}


def test_ranks_of_a_host_are_consecutive():
    script = Script(most=4)
    for name, agent in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        script.began(name, agent=agent)
        script.here(name)
    assert script.world() == {"b": (0, 4), "d": (1, 4), "a": (2, 4), "c": (3, 4)}
    script.say("ended", agent=0, name="b", how="was ended by SIGKILL")
    script.began("e", agent=0)
    for name in "eacd":
        script.here(name)
    assert script.world() == {"d": (0, 4), "e": (1, 4), "a": (2, 4), "c": (3, 4)}


def test_ranks_that_are_left_keep_their_order():
    script = started()
    script.say("ended", agent=0, name="a", how="was ended by SIGKILL")
    assert script.kinds() == {("worker/b", "lost"), ("worker/c", "lost")}
    script.here("c")
    assert script.world() == {}  # b is still in its step
    script.here("b")
    assert script.world() == {"b": (0, 2), "c": (1, 2)}


def test_a_member_that_is_stopped_is_killed_and_one_that_does_not_come_later():
    script = started()
    script.here("b")
    assert {kind for _, kind in script.kinds()} == {"kill if stopped", "lost"}
    script.here("c")
    script.now = 11.0
    script.say("beat", agent=0)
    assert script.kinds() == {("agent/0", "kill")}
    script.say("ended", agent=0, name="a", how="was ended by SIGKILL")
    assert script.world() == {"b": (0, 2), "c": (1, 2)}


def test_newcomers_come_in_after_a_step():
    script = started(most=3)
    script.began("d")
    script.here("d")
    assert script.kinds() == {(f"worker/{name}", "change") for name in "abc"}
    for name in "abc":
        script.here(name)
    assert script.world() == {"a": (0, 4), "b": (1, 4), "c": (2, 4), "d": (3, 4)}


def test_newcomers_that_are_started_together_come_in_together_unless_one_is_late():
    script = started(most=3)
    script.began("d", "e")
    assert script.here("d") == []
    script.here("e")
    assert script.kinds() == {(f"worker/{name}", "change") for name in "abc"}
    script = started(most=3)
    script.began("d", "e")
    assert script.here("d") == []
    script.now += GATHER_WAIT_S + 1
    script.say("beat", agent=0)
    assert script.kinds() == {(f"worker/{name}", "change") for name in "abc"}


def test_a_newcomer_with_another_program_is_refused():
    script = started()
    script.began("d")
    script.here("d", {**FACTS, "torch": "2.12.0"})
    ((to, message),) = script.out
    assert (to, message["is"]) == ("worker/d", "stop")
    assert "torch '2.12.0' and not '2.13.0'" in message["words"]


def test_a_death_while_ranks_gather():
    script = started()
    script.say("ended", agent=0, name="c", how="was ended by SIGKILL")
    script.here("a")
    script.say("ended", agent=0, name="b", how="was ended by SIGKILL")
    assert script.world() == {"a": (0, 1)}


def test_fewer_than_the_least_do_not_go_on():
    script = started(least=3)
    script.say("ended", agent=0, name="c", how="was ended by SIGKILL")
    script.here("a")
    script.here("b")
    assert script.kinds() == {("worker/a", "stop"), ("worker/b", "stop")}
    for name in "ab":
        script.say("ended", agent=0, name=name, how="has ended with status 1")
    assert script.kinds() == {("agent/0", "finish")} and script.rules.code == 1


def test_a_host_that_is_silent_is_gone_and_ends_when_it_is_heard_again():
    script = Script()
    script.say("beat", agent=1)
    script.began("a", "b")
    script.began("c", agent=1)
    for name in "abc":
        script.here(name)
    while script.now < SILENCE_LIMIT_S + 1:
        script.now += 0.5
        script.say("beat", agent=0)
    script.here("a")
    script.here("b")
    assert script.world() == {"a": (0, 2), "b": (1, 2)}
    script.say("beat", agent=1)
    assert script.kinds() == {("agent/1", "finish")}
    script.here("c")
    assert script.kinds() == {("worker/c", "stop")}


def test_no_host_is_blamed_if_the_leader_was_stopped():
    script = started()
    script.say("beat", agent=0)
    script.now += 100.0
    assert script.say("beat", agent=1) == []
    assert set(script.rules.workers) == {"a", "b", "c"}


def test_lost_processes_are_replaced_as_often_as_asked():
    script = started(restarts=1)
    script.say("ended", agent=0, name="a", how="was ended by SIGKILL")
    assert ("agent/0", "start") in script.kinds()
    script.say("ended", agent=0, name="b", how="was ended by SIGKILL")
    assert ("agent/0", "start") not in script.kinds()


def test_who_waits_once_a_member_is_done_has_come_to_the_end_too():
    script = started()
    script.say("done", name="a")
    script.here("b")
    assert script.kinds() == {("worker/b", "over")}
    script.say("done", name="c")
    for name in "abc":
        script.say("ended", agent=0, name=name, how="has ended with status 0")
    assert script.kinds() == {("agent/0", "finish")} and script.rules.code == 0


def test_it_is_over_if_all_die():
    script = started()
    for name in "abc":
        script.say("ended", agent=0, name=name, how="was ended by SIGKILL")
    assert script.rules.code == 1


def test_processes_that_end_before_the_first_world():
    script = Script()
    script.began("a")
    script.say("ended", agent=0, name="a", how="has ended with status 1")
    assert script.rules.code == 1
