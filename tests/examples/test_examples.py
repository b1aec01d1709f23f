"""Every example, on as many ranks as its first comment says, and the fact that it prints."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from consistent.flow.data import load
from tests.consistent.flow.test_face import idx
from tests.launch import launch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CLIENTS = ROOT / "tests" / "consistent" / "integrations"
RANKS = {"two_axes_2d": 4, "global_tensor_mixed": 4, "global_tensor_basic": 1}  # others run on 2


def run(name: str, *args: str, ranks: int | None = None, fails: bool = False) -> str:
    """What ``examples/<name>.py`` prints, all ranks one after the other."""
    count = RANKS.get(name, 2) if ranks is None else ranks
    done = launch(EXAMPLES / f"{name}.py", *args, ranks=count)
    printed, errors = "".join(done.printed), "".join(done.errors)
    assert (done.status != 0) is fails, printed + errors
    return printed + (errors if fails else "")


def run_by_torchrun(name: str) -> str:
    """The same by torchrun, whose ranks are forks of it."""
    forks = ["-m", "tests.forked_ranks", "torch.distributed.run"]
    launcher = [*forks, "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / f"{name}.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def difference(text: str) -> float:
    """The number after "difference ...:"."""
    found = re.search(r"difference[^:]*: ([0-9.e+-]+)", text)
    assert found, text
    return float(found[1])


def test_every_example_is_tested() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    tests = [Path(__file__), Path(__file__).with_name("test_train_gpt.py"), *CLIENTS.glob("*.py")]
    source = "".join(path.read_text() for path in tests)
    known = ('run("{}"', 'started("{}"', 'example("{}")', '"{}.py"')
    assert not {p for p in programs if not any(each.format(p) in source for each in known)}


@pytest.mark.parametrize("started", [run, run_by_torchrun])
def test_boxing_keeps_the_value(started: Callable[[str], str]) -> None:
    text = started("hello_global_tensor")
    assert "S(0): a tensor of shape (5, 3), in pieces (3, 3), (2, 3)" in text
    assert "value unchanged by boxing: True" in text


def test_data_parallel_has_the_losses_of_one_device() -> None:
    assert difference(run("data_parallel")) < 1e-5


def test_tensor_parallel_has_the_gradients_of_one_device_and_one_all_reduce() -> None:
    text = run("tensor_parallel_mlp")
    assert difference(text) < 1e-5
    assert "'P -all_reduce(0)-> B': 1" in text and "all_gather" not in text


def test_two_axes_have_the_losses_of_one_device() -> None:
    assert difference(run("two_axes_2d")) < 1e-5


def test_sharded_optimizer_has_the_losses_of_one_device_and_half_of_its_state() -> None:
    text = run("sharded_optimizer")
    assert difference(text) < 1e-5
    assert "optimizer state on this rank: 7904 bytes of 15808" in text


def test_matmul_of_the_documents_on_one_device() -> None:
    assert run("global_tensor_basic") == "(4, 8)\n"


def test_matmul_of_the_documents_data_parallel() -> None:
    text = run("global_tensor_data_parallel")
    assert text.startswith("(4, 8)\n")
    assert "out is S(0), this rank holds (2, 8)\nequal to one device: True" in text


def test_matmul_of_the_documents_model_parallel() -> None:
    text = run("global_tensor_model_parallel")
    assert text.startswith("(4, 8)\n")
    assert "out is S(1), this rank holds (4, 4)\nequal to one device: True" in text


def test_pipeline_of_the_documents_has_the_gradients_of_one_device() -> None:
    text = run("global_tensor_pipeline")
    assert text.startswith("(4, 8) (4, 3)\n")
    assert "hold of the two stages: [40, 0], [0, 24]" in text
    assert difference(text) < 1e-4


def test_mixed_parallelism_of_the_documents_trains_as_on_one_device() -> None:
    text = run("global_tensor_mixed")
    assert text.startswith("(4, 8) (4, 3)\n")
    assert difference(text) < 1e-5


def test_mirrored_copies_have_the_losses_of_one_process() -> None:
    text = run("mirrored_ddp")
    assert "works on 50 of 100 samples" in text
    assert difference(text) < 1e-4


def test_consistent_lenet_has_the_losses_of_one_rank() -> None:
    assert difference(run("consistent_strategy")) < 1e-4


def test_mlp_with_a_split_output_layer_has_the_losses_of_one_rank() -> None:
    text = run("mixed_parallelism_mlp")
    assert "this rank holds (5, 512) of the output layer's weight" in text
    assert difference(text) < 1e-4


def test_lenet_over_three_placements_has_the_losses_of_one_rank() -> None:
    assert difference(run("mixed_parallelism_lenet")) < 1e-4


def save_digits(folder: Path, training: int, testing: int) -> None:
    """Write so many of scikit-learn's digits to MNIST's four files."""
    images, labels, *others = load()
    parts = {"train": (images, labels, training), "t10k": (*others, testing)}
    for part, (images, labels, count) in parts.items():
        pixels = (images[:count].squeeze(1) * 255).numpy()
        idx(folder / f"{part}-images-idx3-ubyte", pixels)
        idx(folder / f"{part}-labels-idx1-ubyte", labels[:count].numpy())


def test_lenet_on_three_ranks_has_the_losses_of_one(tmp_path: Path) -> None:
    save_digits(tmp_path, 480, 80)
    few = ("--epochs", "1", "--batch", "16", "--data", str(tmp_path))
    text = run("mnist_lenet", *few, "--out", str(tmp_path), ranks=3)
    assert difference(text) < 1e-10
    accuracy = re.findall(r"test accuracy ([0-9.]+)%", text)
    assert float(accuracy[-1]) > 50
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "conv2d" in (tmp_path / "report.html").read_text()


def test_lenet_runs_without_a_launcher(tmp_path: Path) -> None:
    text = run("mnist_lenet", "--epochs", "1", "--single-only", "--out", str(tmp_path), ranks=1)
    assert "one rank alone: test accuracy" in text


def test_lenet_says_which_data_file_is_missing(tmp_path: Path) -> None:
    text = run("mnist_lenet", "--data", str(tmp_path), ranks=1, fails=True)
    assert f"{tmp_path} has neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz" in text


def test_lenet_says_which_data_file_is_cut_short(tmp_path: Path) -> None:
    head = bytes((0, 0, 8, 3)) + b"".join(n.to_bytes(4, "big") for n in (2, 28, 28))
    with gzip.open(tmp_path / "train-images-idx3-ubyte.gz", "wb") as file:
        file.write(head + bytes(100))
    text = run("mnist_lenet", "--data", str(tmp_path), ranks=1, fails=True)
    assert "holds 100 bytes of data, and its head says [2, 28, 28]" in text
