"""Machines as YAML files."""

from __future__ import annotations

from pathlib import Path

import pytest

from consistent.auto.machines import Machine, machine
from consistent.auto.machines.known import KNOWN


@pytest.mark.parametrize("name", KNOWN)
def test_a_machine_that_is_saved_and_loaded_is_the_same(name: str, tmp_path: Path) -> None:
    KNOWN[name].save(tmp_path / "m.yaml")
    assert Machine.load(tmp_path / "m.yaml") == KNOWN[name]


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("ranks_per_host: 8", "", "lacks the entry 'ranks_per_host'"),
        ("ranks_per_host:", "ranks_per_hosts:", "Did you mean 'ranks_per_host'?"),
        ("memory_fraction: 0.8", "memory_fraction: much", "is 'much'; it must be a number"),
        ("memory_fraction: 0.8", "memory_fraction: .nan", "memory_fraction is nan"),
        ("memory_bytes: 80000000000.0", "memory_bytes: -80e9", "memory_bytes is -80000000000.0"),
        ("latency_s: 1.9e-06", "latency: 1", "'latency' of inside. Did you mean 'latency_s'?"),
        ("bfloat16:", "bloat16:", "peak_flops has 'bloat16', which is not a dtype"),
        ("overlap: 1.0", "overlap: 1.5", "overlap is 1.5; it is a fraction"),
        ("overlap: 1.0", "overlap: -1", "overlap is -1; it must not be negative"),
        ("name: a100-8", "name: [", "is not YAML"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_named(old: str, new: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    KNOWN["a100-8"].save(path)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match="machine") as caught:
        Machine.load(path)
    assert said in str(caught.value)


def test_a_file_may_leave_out_the_efficiency_and_write_80e9(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    KNOWN["a100-8"].save(path)
    text = path.read_text().partition("efficiency:")[0].replace("80000000000.0", "80e9")
    path.write_text(text)
    assert machine(path) == KNOWN["a100-8"]


def test_a_name_a_file_or_a_machine_is_found(tmp_path: Path) -> None:
    h100 = machine("h100-8")
    h100.save(tmp_path / "m.yaml")
    assert machine(h100) is h100 is KNOWN["h100-8"]
    assert machine(str(tmp_path / "m.yaml")) == h100


def test_a_mistyped_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'a10-8' is neither .* Did you mean 'a100-8'\?"):
        machine("a10-8")
