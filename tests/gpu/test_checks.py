"""The checks for a GPU, on CPU ranks: each program runs, finds nothing, and can find something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import machine
from tests.gpu.checks import CHECKS, LISTS, MINUTES_9, Check, listed
from tests.gpu.driver import ROOT, TITLES, chosen, environment, own, run_all
from tests.gpu.programs import sources, subjects
from tests.launch import launch
from tests.ranks import ALL

RUN = ROOT / "tests" / "gpu" / "run"
ON_RANKS = [
    "native_ops", "random_bits", "boxing_2_messages", "products_2_messages", "training_2_messages",
    "ring_2_messages", "compiled_2_messages", "schedules_4_messages", "models_2_messages",
    "operators_2_messages", "codecs_2_messages", "plans_4_messages",
    "flexible_2_messages",
]  # fmt: skip

LONG = (
    "flexible_2_messages", "ring_2_messages", "models_2_messages", "operators_2_messages",
)  # fmt: skip


def row(name: str, program: str, seconds: int = 20) -> Check:
    """A check that does nothing but what its line of Python says."""
    return Check(name, f"-c {program}", seconds)


@dataclass(frozen=True)
class _Words(Check):
    """A check whose program has spaces and lines."""

    text: str = ""

    def words(self, device: str) -> list[str]:
        return [sys.executable, "-c", self.text]


def test_every_program_has_a_check_and_runs_here() -> None:
    programs = {path.stem for path in (ROOT / "tests" / "gpu").glob("*.py")}
    beside = {"__init__", "world", "checks", "driver", "programs", "table", "test_checks"}
    beside |= {"machine", "elastic"}  # that is what tests of elastic do
    tried = {check.command.split()[1] for check in CHECKS if check.name in ON_RANKS}
    assert tried == {f"tests.gpu.{name}" for name in programs - beside}


def test_a_check_by_its_name_finds_nothing_wrong_and_says_so(tmp_path: Path) -> None:
    command = [str(RUN), "--device", "cpu", str(tmp_path), "native_ops"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "results.txt").read_text().split()[:2] == ["native_ops", "passed"]
    assert "cpu: 0 wrong" in (tmp_path / "log.txt").read_text()


# The others' programs repeat on ranks what tests of boxing, products and compiled steps show.
@pytest.mark.parametrize("name", ON_RANKS[1:] if ALL else ["random_bits", "schedules_4_messages"])
def test_nothing_is_wrong_on_cpu_ranks(name: str) -> None:
    (check,) = [check for check in CHECKS if check.name == name]
    program = ROOT / "tests" / "gpu" / f"{check.command.split()[1].split('.')[-1]}.py"
    few = ["--every", "60"] if name in LONG else []  # benchmarks and tests of models have all
    done = launch(
        program, "--device", "cpu", *few, ranks=check.ranks, environment=check.environment,
        timeout=check.seconds,
    )  # fmt: skip
    assert done.status == 0, done
    assert "cpu: 0 wrong" in done.printed[0]


# Each breaks one thing of ours, or of what it is compared with.
BROKEN = {
    "boxing_pairs": "m.LARGE = m.BEYOND = m.UNEVEN; "
    "box = m.box; m.box = lambda x, src, dst: 2 * box(x, src, dst)",
    "split_products": "m.ACTIVATIONS['gelu'] = m.ACTIVATIONS['silu']",
    "random_bits": "m.key_after = lambda seed: {'seed': seed, 'counter': 1}",
    "native_ops": "m.TOLERANCES = dict.fromkeys(m.TOLERANCES, 0.0)",
    "training": "m.CLOSE, m.lenet = -1.0, lambda *_: None",
    "compiled_steps": "m.CLOSE = -1.0",
    "plans": "m.CLOSE = -1.0; m.PLANS = m.PLANS[:1]",
    "models": "m.RUNS, m.allowed = m.RUNS[:1], lambda name: -1.0; m.MODELS = {'GPT2': 0}",
    "operators": "m.operators = lambda: ['add']; "
    "m.run_cases = lambda *given: [('wrong', '')] * len(given[3])",
}


@pytest.mark.parametrize("name", BROKEN if ALL else ["boxing_pairs"])
def test_a_wrong_number_is_found(name: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import tests.gpu.{name} as m; {BROKEN[name]}; m.main()")
    done = launch(program, ranks=1, environment=environment(CHECKS[1], "cpu", os.environ))
    assert done.status == 1, done.errors
    assert "rank 0: " in done.printed[0] and " 0 wrong" not in done.printed[0]


def test_a_failure_is_told_and_the_next_check_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        row("bad", "print('why');raise(SystemExit(3))"),
        row("slow", "__import__('time').sleep(60)", seconds=1),
        row("good", "print('well')"),
    ]
    assert run_all(rows, "cpu", tmp_path, 60) == ["bad", "slow"]
    told = [line.split("  ")[0] for line in (tmp_path / "results.txt").read_text().splitlines()]
    assert told == ["bad", "slow", "good"]
    assert "    why\n" in capsys.readouterr().out
    assert "well" in (tmp_path / "log.txt").read_text()


def test_checks_run_together_but_for_those_that_are_timed(tmp_path: Path) -> None:
    meet = (
        "import pathlib, time\nmine, other = map(pathlib.Path, {!r})\nmine.touch()\n"
        "while not other.exists(): time.sleep(0.01)\nprint(len(list(mine.parent.glob('*.met'))))"
    )
    ends = [str(tmp_path / f"{name}.met") for name in "ab"]
    rows = [
        Check("a", "-c", 20),
        Check("b", "-c", 20),
        replace(row("timed", "print('by','itself')"), alone=True),
    ]
    words = [meet.format(ends), meet.format(ends[::-1])]
    made = [_Words(r.name, "-c", r.seconds, text=w) for r, w in zip(rows, words, strict=False)]
    assert run_all([*made, rows[2]], "cpu", tmp_path, 60, together=8) == []
    assert (tmp_path / "results.txt").read_text().splitlines()[2].startswith("timed")
    assert sorted(path.name for path in tmp_path.glob("*.log")) == []


def test_what_the_launcher_says_of_a_failure_is_left_out() -> None:
    said = [f"line {k}" for k in range(40)]
    launchers = ["W1 torch/distributed/elastic/multiprocessing/api.py:1] Sending", "Traceback"]
    assert own(said + launchers) == own(said) == said


def test_without_time_or_a_build_nothing_begins(tmp_path: Path) -> None:
    alone = replace(row("alone", "print('well')"), built=False)
    rows = [row("build", "raise(SystemExit(1))"), row("other", "1"), alone]
    assert run_all(rows, "cuda", tmp_path, 60) == ["build", "other"]
    assert "other                 not started" in (tmp_path / "results.txt").read_text()
    assert run_all(rows[1:], "cuda", tmp_path, 0) == ["other", "alone"]


@pytest.mark.parametrize("name", LISTS)
def test_a_list_knows_the_machine_and_builds_before_all_else(name: str) -> None:
    checks = listed(name)
    assert [check.name for check in checks][:2] == ["machine", "build"]
    assert all(check.seconds < MINUTES_9 - 60 for check in checks)
    assert sum(check.seconds for check in checks[2:]) > MINUTES_9 // 2


def test_the_machine_is_named_in_a_line() -> None:
    assert list(machine.lines())[-1].startswith(f"torch {torch.__version__}, CUDA ")


def test_a_table_is_there_as_soon_as_a_check_has_ended(tmp_path: Path) -> None:
    at = f"'{tmp_path}/table.md'"
    reads = f"print(__import__('pathlib').Path({at}).read_text().count('passed'))"
    rows = [
        row("machine", "print('1|H100')"),
        row("speed", "print(2.5,'GB/s')"),
        row("last", reads),
    ]
    assert not run_all(rows, "cpu", tmp_path, 60, TITLES["speeds"])
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("**Speeds, ") and "1/H100" in table.splitlines()[0]
    assert "| `speed` | passed | " in table and "| 2.5 GB/s |" in table
    assert "| 2 |\n" in table and "`speed`\n\n```\n2.5 GB/s\n```" in table


def test_the_notebook_runs_lists_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples")
    cells = json.loads((ROOT / "examples" / "gpu_checks.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    exec(code[0], names)
    assert [words[0].strip("-") for words in names["LISTS"]] == list(LISTS)
    names.update(DEVICE="cpu", LISTS=(["machine"], ["machine", "--seconds", "0"]))
    for cell in code[1:]:
        exec(cell, names)
    assert "| `machine` | passed | " in names["first"]
    assert "| `machine` | not started | " in names["speeds"]


def test_checks_are_chosen_by_name_in_order_after_a_build() -> None:
    assert [check.name for check in chosen(["overhead", "native_ops"], "cuda")] == [
        "build", "native_ops", "overhead",
    ]  # fmt: skip
    assert chosen([], "cuda") == CHECKS
    assert {"build", "memcheck"}.isdisjoint(check.name for check in chosen([], "cpu"))
    with pytest.raises(SystemExit, match="no check memcheck on cpu"):
        chosen(["memcheck"], "cpu")


def test_ranks_that_share_a_gpu_are_told_so() -> None:
    named = {check.name: check for check in CHECKS}
    there = {"CONSISTENT_NCCL": "/there/libnccl.so.2"}
    for check in (named["boxing_2_peers"], named["boxing_speed"]):
        made = environment(check, "cuda", there)
        assert made["LD_PRELOAD"] == "/there/libnccl.so.2"
        assert made["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert "LD_PRELOAD" not in environment(check, "cuda", {})
        assert "NCCL_MAX_CTAS" not in environment(check, "cpu", there)
    alone = environment(named["build"], "cuda", there)
    assert "LD_PRELOAD" not in alone and alone["CONSISTENT_CUDA"] == "1"


def test_every_cuda_program_has_its_sources() -> None:
    assert subjects()
    for subject in subjects():
        assert sources(subject)[0].name == f"{subject}_test.cu"
        assert {path.suffix for path in sources(subject)} == {".cu", ".cpp"}
        assert all(path.exists() for path in sources(subject))
