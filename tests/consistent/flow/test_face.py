"""The smaller names: optimizer, config, tensors, nn, data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import consistent
import consistent.flow as flow
from consistent import B, S
from consistent.flow import data
from consistent.flow.jobs.function_config import TrainConfig
from tests.ranks import pool


def test_names_that_are_not_ours_are_those_of_torch() -> None:
    assert flow.matmul is torch.matmul and flow.float is torch.float and flow.int32 is torch.int32
    assert flow.nn.Module is torch.nn.Module and flow.nn.Linear is torch.nn.Linear
    with pytest.raises(AttributeError):
        _ = flow.no_such_name


def test_piecewise_constant_learning_rate() -> None:
    schedule = flow.optimizer.PiecewiseConstantScheduler([2, 4], [1.0, 0.5, 0.1])
    assert [schedule(step) for step in range(7)] == [1, 1, 1, 0.5, 0.5, 0.1, 0.1]
    with pytest.raises(ValueError, match="2 boundaries and 2 values"):
        flow.optimizer.PiecewiseConstantScheduler([2, 4], [1.0, 0.5])


def test_optimizers_of_the_older_config() -> None:
    config = TrainConfig()
    assert config.optimizer() is None
    config.primary_lr(0.1)
    schedule = flow.optimizer.PiecewiseConstantScheduler([], [0.1])
    assert config.optimizer() == flow.optimizer.SGD(schedule, 0.0)
    config.model_update_conf({"momentum_conf": {"beta": 0.8}})
    assert config.optimizer() == flow.optimizer.SGD(schedule, 0.8)
    config.model_update_conf({"adam_conf": {"beta1": 0.5}})
    assert config.optimizer() == flow.optimizer.Adam(schedule, beta1=0.5)
    with pytest.raises(ValueError, match="is not known"):
        config.model_update_conf({"lars_conf": {}})


def tensors(rank: int) -> Any:
    world = flow.placement.all("cpu")
    x = flow.to_global(torch.ones(2, 3), placement=world, sbp=flow.sbp.split(0))
    y = x.to_global(sbp=flow.sbp.broadcast)
    z = flow.to_global(y, sbp=flow.sbp.split(1))
    return (
        world.size,
        tuple(x.shape),
        y.sbp == (B,),
        z.sbp == (S(1),),
        flow.config.devices() == world,
    )


def test_tensors_of_the_face_are_global_tensors() -> None:
    assert pool(2).run(tensors) == [(2, (4, 3), True, True, True)] * 2
    assert type(flow.randn(2)) is torch.Tensor
    with pytest.raises(TypeError, match="sbp is missing"):
        flow.to_global(torch.ones(2), placement=consistent.placement("cpu", [0]))


def test_parts_of_a_job_have_its_device_count() -> None:
    flow.clear_default_session()
    flow.config.cpu_device_num(1)
    flow.config.machine_num(1)
    assert flow.config.devices().ranks.tolist() == [0]
    with pytest.raises(ValueError, match="2 machines are asked for, and the program runs on 1"):
        flow.config.machine_num(2)


# -- digits --------------------------------------------------------------------------------------


def idx(path: Path, values: np.ndarray) -> None:
    head = bytes((0, 0, 8, values.ndim)) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    path.write_bytes(head + values.astype(np.uint8).tobytes())


def test_load_mnist_reads_the_original_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = np.arange(5 * 784).reshape(5, 28, 28) % 256
    for part in ("train", "t10k"):
        idx(tmp_path / f"{part}-images-idx3-ubyte", images)
        idx(tmp_path / f"{part}-labels-idx1-ubyte", np.arange(5))
    monkeypatch.setenv("CONSISTENT_MNIST", str(tmp_path))
    (train_images, train_labels), (test_images, test_labels) = flow.data.load_mnist(2)
    assert len(train_images) == len(train_labels) == len(test_images) == 2
    assert train_images[0].shape == (2, 1, 28, 28) and train_images[0].dtype == np.float32
    assert train_labels[1].tolist() == [2, 3] and train_labels[1].dtype == np.int32
    assert np.array_equal(train_images[1], (images[2:4] / 255).astype(np.float32)[:, None])
    assert [x.tolist() for x in test_labels] == [[0, 1], [2, 3]]


def test_load_mnist_says_that_it_takes_the_bundled_digits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("CONSISTENT_MNIST", raising=False)
    monkeypatch.setenv(data.STEPS, "3")
    (images, labels), _ = flow.data.load_mnist(100)
    assert capsys.readouterr().err.count("\n") == 1
    assert len(images) > 500 and images[-1].shape == (100, 1, 28, 28)
    assert 0 <= images[0].min() and images[0].max() <= 1
    # Three steps in all, however many passes.
    assert [len(list(zip(images, labels))) for _ in range(3)] == [3, 0, 0]
