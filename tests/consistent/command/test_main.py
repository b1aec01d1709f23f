"""python -m consistent: the words, what info and bench say, a script run under report()."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from consistent.command import bench, info, main, slow
from consistent.command.main import COMMANDS, USAGE
from mirrored.transports.default import current
from mirrored.transports.shared_memory import SharedMemory
from mirrored.transports.shared_memory.segments import SWITCH
from mirrored.transports.symmetric_memory import SymmetricMemory
from mirrored.transports.torch_dist import TorchDist
from mirrored.transports.tuning import table
from tests.launch import launch
from tests.mirrored.transports.symmetric_memory.host_memory import HostMemory
from tests.ranks import ON_ONE_AXIS, pool


def _said(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no command is given"),
        (["inf"], "'inf' is not a command. Did you mean info?"),
        (["xyz"], "'xyz' is not a command.\n"),
        (["info", "now"], "info takes no argument, and 'now' is given"),
    ],
    ids=["none", "mistyped", "unknown", "argument"],
)
def test_words_that_name_no_command_are_refused_with_the_usage(words: list[str], says: str) -> None:
    status, out, err = _said(*words)
    assert status == 2 and not out and says in err and err.endswith(USAGE)


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["bench", "--help"]], ids=" ".join)
def test_help_is_no_error(words: list[str]) -> None:
    assert _said(*words) == (0, USAGE, "") and all(f"  {name}" in USAGE for name in COMMANDS)


def test_info_names_versions_native_code_and_the_way_between_ranks() -> None:
    status, out, _ = _said("info")
    assert status == 0 and f"torch {torch.__version__}" in out
    assert out.count(": loaded, ") == 3 and "MISSING" not in out
    assert "this process is the only rank" in out and "slow, and why" in out


def _info(rank: int, shared: str) -> list[str]:
    os.environ[SWITCH] = shared
    try:
        return list(info.report())
    finally:
        del os.environ[SWITCH]


def test_info_says_how_ranks_reach_each_other() -> None:
    (text, other) = pool(2).run(_info, "1")
    assert text == other
    assert "  2 ranks on 1 host" in text
    assert any(line.startswith("  CPU tensors: shared memory, for all") for line in text)


class Unreached(HostMemory):
    """Memory that no GPU can make."""

    def __init__(self, *_: Any) -> None:
        raise RuntimeError("no peer access")


def _way_of_gpus(rank: int, make: Any, wanted: bool, hosts: tuple[str, str]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for ranks in (2, 3):
            table.save(table.Table(), ranks, "cpu")
        transport = SymmetricMemory(SharedMemory(TorchDist()), "cpu", 4096, make)
        return info._gpu_transport_text(transport, (0, 1), wanted, hosts, "cpu")


def test_info_says_why_gpus_do_not_read_each_others_memory() -> None:
    says = {
        (HostMemory, True): "symmetric memory, for each GPU reads the others'",
        (Unreached, True): "failed to read the others' memory: RuntimeError: no peer access",
    }
    for given, words in says.items():
        for said in pool(2).run(_way_of_gpus, *given, ("here", "here")):
            assert said.endswith(words)
    assert info._gpu_transport_text(current(), (0,), False, ("here",)).endswith(
        f"{SWITCH}=0 is set on some rank"
    )
    assert "the ranks are on 2 hosts" in info._gpu_transport_text(current(), (0,), True, ("a", "b"))
    assert "the process group has no NCCL; not sym" in info._gpu_transport_text(
        current(), (0,), True, ()
    )


def test_what_is_slow_is_told_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not slow._threads()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert slow._threads() == [
        "2 ranks of 2 threads share 2 cores. Set OMP_NUM_THREADS=1, or call "
        "torch.set_num_threads(1)."
    ]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "Start at most 2 ranks" in slow._threads()[0]
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    found = "\n".join(slow.findings())
    assert f"{SWITCH}=0" in found and "CUDA_LAUNCH_BLOCKING=1" in found


def _of_table(rank: int, folder: str, latency_s: float) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        table.save(table.Table(latency_s=latency_s), 2, table.cpu_device_name())
        return slow._table_warning()


def test_a_table_that_was_measured_beside_other_work_is_told(tmp_path: Path) -> None:
    assert pool(2).run(_of_table, str(tmp_path), 5e-6) == [[], []]
    (said, _) = pool(2).run(_of_table, str(tmp_path), 6.4e-3)
    assert "counts 6,400 us" in said[0] and "--nproc_per_node 2 -m mirrored.tr" in said[0]
    assert not slow._table_warning()  # one rank sends nothing


def test_bench_prints_times_and_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "CALLS", 2)
    status, out, _ = _said("bench")
    rows = out.splitlines()
    assert status == 0 and rows[0].split()[-1] == "ratio" and rows[1].startswith("add [8, 8]")
    # Times of two calls each: beside other work a ratio may be anything, 0.00 too.
    assert all(
        float(us.replace(",", "")) > 0 and float(ratio.replace(",", "")) >= 0
        for *_, us, _, ratio in map(str.split, rows[1:5])
    )
    assert "torchrun" in rows[-1]


def _boxings(rank: int) -> list[Any]:
    bench.ROUNDS, bench.CALLS, bench.SIZES = 1, 2, (4096,)
    from consistent import Placement

    return bench._boxings(Placement.all("cpu"))


@pytest.mark.parametrize("ranks", ON_ONE_AXIS)
def test_bench_boxes_between_ranks(ranks: int) -> None:
    rows = pool(ranks).run(_boxings)[0]
    assert [row[0] for row in rows] == [f"{name} of 4 KiB" for name, *_ in bench.BOXINGS]
    assert all(here > 0 and messages > 0 for _, here, messages in rows)


SCRIPT = """
import sys
import torch
import consistent
from consistent import S, B
p = consistent.placement("cpu", 0)
x = consistent.distribute(torch.ones(4, 4), p, S(0))
y = x @ x
print("arguments", sys.argv[1:], __name__)
if "fail" in sys.argv:
    raise KeyError("as asked")
"""


def _explain(tmp_path: Path, *words: str) -> tuple[int, str, str]:
    (tmp_path / "job.py").write_text(SCRIPT)
    return _said("explain", "--html", str(tmp_path / "r.html"), str(tmp_path / "job.py"), *words)


def test_a_script_is_run_under_a_report(tmp_path: Path) -> None:
    before = list(sys.argv)
    status, out, _ = _explain(tmp_path, "--steps", "3")
    assert status == 0 and "arguments ['--steps', '3'] __main__" in out
    assert "matmul" in out and "job.py:8" in out and "1 op ran" in out
    assert (tmp_path / "r.html").read_text().count("matmul") >= 1 and sys.argv == before


def test_a_script_that_fails_is_explained_up_to_there(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="as asked"):
        _explain(tmp_path, "fail")
    assert "matmul" in (tmp_path / "r.html").read_text()


def test_a_file_that_is_not_there_is_an_error() -> None:
    err = io.StringIO()
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stderr(err):
        main(["explain", "nowhere.py"])
    assert stop.value.code == 2 and "'nowhere.py' is not a file" in err.getvalue()


AS_A_MODULE = """
import runpy
runpy.run_module("consistent", run_name="__main__", alter_sys=True)
"""


def test_it_is_run_as_a_module(tmp_path: Path) -> None:
    """In a process that has the library; the doctor's tests start an interpreter with -m."""
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "program.py").write_text(AS_A_MODULE)
    words = ["explain", "--trace", str(tmp_path / "t.json"), str(tmp_path / "job.py")]
    done = launch(tmp_path / "program.py", *words, ranks=1)
    assert done.status == 0, done.errors
    assert any(
        e["name"] == "matmul" for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    )
