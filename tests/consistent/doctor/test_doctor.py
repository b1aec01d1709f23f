"""Planted troubles are found, and the cure is named; a healthy machine has none of them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consistent.command import main
from consistent.doctor import installation, machine, network, self_test
from consistent.doctor import main as doctor
from consistent.doctor.finding import Finding
from consistent.doctor.main import exit_status
from tests.launch import Started

ROOT = Path(__file__).parents[3]
Patch = pytest.MonkeyPatch
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def only(found: Iterable[Finding]) -> Finding:
    """The one that is not well."""
    (bad,) = [finding for finding in found if finding.cure]
    return bad


def old_torch(patch: Patch) -> Iterable[Finding]:
    patch.setattr(installation, "version", lambda name: "2.9.1+cu128")
    return installation._versions()


def no_torch(patch: Patch) -> Iterable[Finding]:
    patch.setattr(installation, "version", lambda name: None)
    return installation._versions()


def two_packages(patch: Patch) -> Iterable[Finding]:
    patch.setattr(installation, "conflicts", lambda _: iter([Finding("two", "Uninstall one")]))
    return installation._package()


def another_system(patch: Patch) -> Iterable[Finding]:
    patch.setattr(installation.platform, "system", lambda: "Darwin")
    return installation._package()


def native_that_does_not_load(patch: Patch) -> Iterable[Finding]:
    error = "Traceback ...\nImportError: undefined symbol: _ZN2at\n  And what to do.\n"
    done = SimpleNamespace(returncode=1, stderr=error, stdout="")
    patch.setattr(installation.subprocess, "run", lambda *_, **__: done)
    return installation._native_modules()


def native_that_crashes(patch: Patch) -> Iterable[Finding]:
    done = SimpleNamespace(returncode=-11, stderr="", stdout="")
    patch.setattr(installation.subprocess, "run", lambda *_, **__: done)
    return installation._native_modules()


def no_compiler(patch: Patch) -> Iterable[Finding]:
    patch.setattr(installation.shutil, "which", lambda name: None)
    patch.setattr(installation, "version", lambda name: None)
    return installation._compiler()


def no_safetensors(patch: Patch) -> Iterable[Finding]:
    there = installation.util.find_spec
    patch.setattr(
        installation.util, "find_spec", lambda name: None if name == "safetensors" else there(name)
    )
    return installation._packages()


def mistyped_variable(patch: Patch) -> Iterable[Finding]:
    return installation._variables({"CONSISTENT_SHARED_MEMROY": "0", "CONSISTENT_CHECK": "1"})


def cache_that_others_write(patch: Patch) -> Iterable[Finding]:
    folder = Path(os.environ["XDG_CACHE_HOME"], "consistent")
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    return installation._cache()


def cache_that_is_relative(patch: Patch) -> Iterable[Finding]:
    patch.setenv("XDG_CACHE_HOME", "build/cache")
    return installation._cache()


def cache_that_cannot_be_written(patch: Patch) -> Iterable[Finding]:
    patch.setattr(os, "access", lambda *_: False)
    return installation._cache()


def more_ranks_than_cores(patch: Patch) -> Iterable[Finding]:
    patch.setattr(machine, "cores", lambda: 2)
    patch.setenv("LOCAL_WORLD_SIZE", "3")
    return machine._cores()


def container_of_one_core(patch: Patch) -> Iterable[Finding]:
    patch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    patch.setattr(machine, "_read_text", lambda path: "100000 100000")
    patch.setenv("OMP_NUM_THREADS", "8")
    return machine._cores()


def more_threads_than_cores(patch: Patch) -> Iterable[Finding]:
    patch.setattr(machine, "cores", lambda: 8)
    patch.setenv("LOCAL_WORLD_SIZE", "2")
    patch.setenv("OMP_NUM_THREADS", "8")
    return machine._cores()


def nested(patch: Patch, **files: str) -> None:
    """Containers around this one, each with a limit of its own; the outer ones are the tighter."""
    root = Path(os.environ["XDG_CACHE_HOME"])
    for folder, lines in (("proc/self", {"cgroup": "0::/pod/job"}), ("cgroup/pod", files)):
        (root / folder).mkdir(parents=True)
        for name, line in lines.items():
            (root / folder / name.replace("_", ".")).write_text(f"{line}\n")
    (root / "cgroup/pod/job").mkdir()
    for name in files:
        (root / "cgroup/pod/job" / name.replace("_", ".")).write_text("max\n")
    patch.setattr(machine, "PROC", root / "proc")
    patch.setattr(machine, "CGROUP", root / "cgroup")


def few_cores_around_the_container(patch: Patch) -> Iterable[Finding]:
    patch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    nested(patch, cpu_max="200000 100000")
    patch.setenv("LOCAL_WORLD_SIZE", "3")
    return machine._cores()


def little_memory_around_the_container(patch: Patch) -> Iterable[Finding]:
    nested(patch, memory_max=str(1 << 30))
    return machine._memory()


def small_container(patch: Patch) -> Iterable[Finding]:
    patch.setattr(machine, "_read_text", lambda path: str(1 << 30))
    return machine._memory()


def few_files(patch: Patch) -> Iterable[Finding]:
    import resource

    limits = {resource.RLIMIT_NOFILE: (256, 256), resource.RLIMIT_AS: (-1, -1)}
    patch.setattr(resource, "getrlimit", limits.__getitem__)
    return machine._limits()


def no_shared_memory(patch: Patch) -> Iterable[Finding]:
    patch.setattr(machine, "SHARED", Path("/nowhere"))
    return machine._shared_memory()


def full_shared_memory(patch: Patch) -> Iterable[Finding]:
    patch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    return machine._shared_memory()


def dead_ranks(patch: Patch) -> Iterable[Finding]:
    shared = Path(os.environ["XDG_CACHE_HOME"], "shm")
    shared.mkdir()
    space = os.stat("/proc/self/ns/pid").st_ino
    alive = machine._start_time(os.getpid())
    for pid, start in ((os.getpid(), alive), (os.getpid(), alive - 1), (2**22 + 1, 5)):
        (shared / f"consistent-{space}-{pid}-{start}-0123").write_bytes(b"\0" * 8192)
    patch.setattr(machine, "SHARED", shared)
    return machine._dead_segments()


def wrong_clock(patch: Patch) -> Iterable[Finding]:
    patch.setattr(machine.time, "time", lambda: 86400.0)
    patch.setattr(machine.time, "gmtime", lambda: SimpleNamespace(tm_year=1970))
    return machine._clock()


def name_without_address(patch: Patch) -> Iterable[Finding]:
    def unknown(name: str) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    patch.setattr(network, "_addresses", unknown)
    return network._host_name()


def name_that_other_hosts_cannot_reach(patch: Patch) -> Iterable[Finding]:
    patch.setattr(network, "_addresses", lambda name: [(2, 1, 6, "", ("127.0.1.1", 0))])
    for name, value in (LAUNCHED | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}).items():
        patch.setenv(name, value)
    return network._host_name()


def server_that_does_not_answer(patch: Patch) -> Iterable[Finding]:
    patch.setattr(network.socket, "getaddrinfo", lambda *_: time.sleep(60))
    patch.setattr(network, "_LOOKUP_S", 0.1)
    return network._host_name()


def world_size_alone(patch: Patch) -> Iterable[Finding]:
    return network._launch_variables({"WORLD_SIZE": "2"})


def rank_alone(patch: Patch) -> Iterable[Finding]:
    return network._launch_variables({"RANK": "1", "MASTER_PORT": "29500", "WORLD_SIZE": ""})


def without_address(patch: Patch) -> Iterable[Finding]:
    return network._launch_variables({**LAUNCHED, "MASTER_ADDR": ""})


def size_that_is_no_number(patch: Patch) -> Iterable[Finding]:
    return network._launch_variables(LAUNCHED | {"WORLD_SIZE": "two"})


def rank_beyond_the_world(patch: Patch) -> Iterable[Finding]:
    return network._launch_variables(LAUNCHED | {"RANK": "2"})


def no_such_interface(patch: Patch) -> Iterable[Finding]:
    return network._interfaces({"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "=l"})


def first_host_without_address(patch: Patch) -> Iterable[Finding]:
    return network._rendezvous({"MASTER_PORT": "29500", "MASTER_ADDR": "no-such-host.invalid"})


def port_taken(patch: Patch) -> Iterable[Finding]:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        return list(network._rendezvous({"MASTER_PORT": str(other.getsockname()[1])}))


def port_that_is_none(patch: Patch) -> Iterable[Finding]:
    return network._rendezvous({"MASTER_PORT": "29500x"})


TROUBLES = {
    old_torch: ("torch 2.9.1+cu128; this package needs 2.11", "pip install torch=="),
    no_torch: ("torch is not installed for", "pip install torch=="),
    two_packages: ("two", "Uninstall one"),
    another_system: ("this is Darwin", "Linux"),
    native_that_does_not_load: ("ImportError: undefined symbol: _ZN2at", "Install the package"),
    native_that_crashes: ("fails: it ended with status -11", "Install the package"),
    no_compiler: ("no C++ compiler", "apt install g++"),
    no_safetensors: ("safetensors is not installed", "pip install safetensors"),
    mistyped_variable: ("CONSISTENT_SHARED_MEMROY", "Did you mean CONSISTENT_SHARED_MEMORY?"),
    cache_that_others_write: ("others may write in it", "XDG_CACHE_HOME"),
    cache_that_is_relative: ("build/cache, which is relative", "absolute path"),
    cache_that_cannot_be_written: ("cannot be written", "XDG_CACHE_HOME"),
    more_ranks_than_cores: ("3 ranks share 2 cores", "at most 2 ranks"),
    container_of_one_core: ("1 rank of 8 threads share 1 cores", "OMP_NUM_THREADS=1"),
    more_threads_than_cores: ("2 ranks of 8 threads share 8 cores", "OMP_NUM_THREADS=4"),
    few_cores_around_the_container: ("3 ranks share 2 cores", "at most 2 ranks"),
    little_memory_around_the_container: ("this container may use 1 GiB", "Give it more"),
    small_container: ("this container may use 1 GiB", "Give it more"),
    few_files: ("may open 256 files", "ulimit -n"),
    no_shared_memory: ("there is no /nowhere; ranks of this host will send messages", "Mount it"),
    full_shared_memory: ("has 64 MiB free", "--shm-size"),
    dead_ranks: ("2 segments of ranks that are dead take 16 KiB", "removes them"),
    wrong_clock: ("the clock says", "timedatectl"),
    name_without_address: ("has no address", "/etc/hosts"),
    name_that_other_hosts_cannot_reach: ("127.0.1.1, which other hosts cannot reach", "/etc/hosts"),
    server_that_does_not_answer: ("takes more than 0.1 s", "/etc/hosts"),
    world_size_alone: (
        "WORLD_SIZE=2: set without RANK, MASTER_ADDR, MASTER_PORT, so a process is alone",
        "`unset WORLD_SIZE`",
    ),
    rank_alone: ("RANK=1, MASTER_PORT=29500: set without WORLD_SIZE", "`unset RANK MASTER_PORT`"),
    without_address: ("set without MASTER_ADDR", "torchrun"),
    size_that_is_no_number: ("WORLD_SIZE=two", "torchrun"),
    rank_beyond_the_world: ("RANK=2, WORLD_SIZE=2", "torchrun"),
    no_such_interface: ("GLOO_SOCKET_IFNAME=eth7", "Name one of "),
    first_host_without_address: ("no-such-host.invalid has no address", "first rank's host"),
    port_taken: ("where the first rank would listen: ", "Set MASTER_PORT to a free one"),
    port_that_is_none: ("29500x is not a port", "Set MASTER_PORT"),
}  # fmt: skip


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
def test_a_planted_trouble_is_found_with_its_cure(
    trouble: Any, monkeypatch: Patch, tmp_path: Path
) -> None:
    for name in ("LOCAL_WORLD_SIZE", *LAUNCHED, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said, cure = TROUBLES[trouble]
    bad = only(trouble(monkeypatch))
    assert said in bad.said and cure in bad.cure


@pytest.mark.parametrize("alone", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_a_variable_of_launchers_alone_makes_no_job_of_several_hosts(alone: str) -> None:
    assert not network._is_on_several_hosts({alone: "2"})
    assert not network._is_on_several_hosts(LAUNCHED) and not list(
        network._launch_variables(LAUNCHED)
    )
    assert network._is_on_several_hosts(LAUNCHED | {"LOCAL_WORLD_SIZE": "1"})


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "XDG_CACHE_HOME"])
def test_variables_that_are_empty_are_as_if_not_set(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv(name, "")
    assert list(machine._cores()) and list(installation._cache())


def test_systems_without_unix_calls_are_looked_at(monkeypatch: Patch) -> None:
    for name in ("sysconf", "geteuid", "sched_getaffinity"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(installation, "version", lambda name: "2.16a0")
    found = [*machine._cores(), *machine._memory(), *installation._cache()]
    assert found and not any(f.is_to_do for f in (*found, *installation._versions()))


def test_a_check_that_fails_does_not_keep_the_others_from_running(capsys: Any) -> None:
    def broken() -> Iterable[Finding]:
        raise ZeroDivisionError("as planted")

    first, last = doctor._run_checks((broken, lambda: [Finding("the other one")]))
    assert "broken of the doctor itself failed: ZeroDivisionError: as planted" in first.said
    assert first.is_to_do and last.said == "the other one"


FAILING = "import sys, time; time.sleep(60 * int({hangs})); raise ValueError('as planted')"


@pytest.mark.parametrize("hangs", [False, True])
def test_ranks_that_fail_or_hang_are_ended(hangs: bool, monkeypatch: Patch, tmp_path: Path) -> None:
    started: list[subprocess.Popen] = []

    def start(rank: int, folder: str, port: int) -> subprocess.Popen:
        program = FAILING.format(hangs=hangs or rank == 0)
        with open(Path(folder, f"errors{rank}"), "w") as errors:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", program], stderr=errors, start_new_session=True
                )
            )
        return started[-1]

    monkeypatch.setattr(self_test, "_start_rank", start)
    monkeypatch.setattr(self_test, "LIMIT_S", 1.0 if hangs else 60.0)
    bad = only(self_test.check())
    assert ("has not ended after 1 s" if hangs else "rank 1 of the self-test failed") in bad.said
    assert all(each.returncode is not None for each in started)


def test_the_exit_status_tells_ranks_that_fail_from_what_is_to_be_done() -> None:
    well, bad = Finding("well"), Finding("not well", "mend it")
    assert exit_status({"machine": [well], "two ranks": [well]}) == 0
    assert exit_status({"machine": [bad], "two ranks": [well]}) == 1
    assert exit_status({"machine": [bad], "two ranks": [bad]}) == 2
    maybe = Finding("scipy is not installed", "pip install scipy", optional=True)
    assert exit_status({"installation": [maybe], "two ranks": [well]}) == 0


def test_it_is_a_command_and_refuses_other_words(capsys: Any) -> None:
    assert main(["doctor", "--help"]) == 0 and "Exit status" in capsys.readouterr().out
    assert main(["doctor", "now"]) == 2


def test_all_variables_that_the_library_reads_are_known() -> None:
    read: set[str] = set()
    for folder in ("consistent", "mirrored", "tests", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != Path(__file__) and "doctor" not in path.parts:
                read |= set(re.findall(r'"(CONSISTENT_[A-Z_]+)"', path.read_text()))
    assert read <= installation.VARIABLES


def test_looking_at_the_cache_makes_nothing(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not any(f.cure for f in installation._cache()) and not list(tmp_path.iterdir())


def test_a_doctor_that_is_terminated_ends_its_ranks(tmp_path: Path) -> None:
    path = tmp_path / "doctor.py"
    path.write_text(
        "import os, sys; from consistent.doctor import self_test\n"
        "start = self_test._start_rank\n"
        "def told(*given):\n"
        "    rank = start(*given); print(rank.pid, flush=True); return rank\n"
        "self_test._start_rank = told\n"
        "list(self_test.check())\n"
    )
    doctor = Started(path)
    try:
        until = time.monotonic() + 60.0
        while doctor.printed.count("\n") < self_test.RANKS and time.monotonic() < until:
            time.sleep(0.02)
        pids = [int(line) for line in doctor.printed.split()]
        assert len(pids) == self_test.RANKS, doctor.errors
        doctor.terminate()
        doctor.wait(30)
        assert doctor.status == 143 and not any(machine._start_time(pid) for pid in pids)
    finally:
        doctor.kill()
