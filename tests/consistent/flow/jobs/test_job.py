"""Jobs: one program under both views, on any number of ranks, as plain torch; what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import consistent.flow as flow
import consistent.flow.typing as tp
from tests.ranks import ALL, ON_ONE_AXIS, pool

BATCH, CLASSES = 12, 5
LAST_FAST, RATES = (
    3,
    {"SGD": (0.04, 0.05), "Adam": (0.01, 0.001)},
)  # learning rates up to that step, and later


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """A pattern for each class, and noise."""
    numbers = np.random.default_rng(step)
    labels = numbers.integers(0, CLASSES, BATCH).astype(np.int32)
    patterns = np.random.default_rng(99).standard_normal((CLASSES, 1, 8, 8))
    return patterns[labels] + numbers.standard_normal((BATCH, 1, 8, 8)) / 2, labels


# -- one LeNet, four ways ------------------------------------------------------------------------


def lenet(images: Any, dropout: bool, split: bool) -> Any:
    initializer = flow.truncated_normal(0.1)
    x = images
    for k, filters in enumerate((4, 6)):
        x = flow.layers.conv2d(
            x,
            filters,
            5,
            padding="SAME",
            activation=flow.nn.relu,
            kernel_initializer=initializer,
            name=f"conv{k}",
        )
        x = flow.nn.max_pool2d(x, ksize=2, strides=2, padding="SAME")
    x = flow.reshape(x, [x.shape[0], -1])
    distribute = flow.distribute.split(axis=0) if split else flow.distribute.broadcast()
    x = flow.layers.dense(
        x,
        16,
        activation=flow.nn.relu,
        kernel_initializer=initializer,
        name="hidden",
        model_distribute=distribute,
    )
    if dropout:
        x = flow.nn.dropout(x, rate=0.5)
    return flow.layers.dense(x, CLASSES, kernel_initializer=initializer, name="out")


def job_of(view: str, ranks: int, dropout: bool, optimizer: Any, counts: int = BATCH) -> flow.Job:
    config = flow.function_config()
    # In f64: in f32 rounding sooner or later flips a relu, and from there any two programs part.
    config.default_data_type(flow.double)
    mirrored = view == "mirrored"
    config.default_logical_view(
        flow.scope.mirrored_view() if mirrored else flow.scope.consistent_view()
    )
    kind, count = (tp.ListNumpy, counts // ranks) if mirrored else (tp.Numpy, counts)

    @flow.global_function(type="train", function_config=config)
    def job(
        images: kind.Placeholder((count, 1, 8, 8), dtype=flow.double),  # type: ignore
        labels: kind.Placeholder((count,), dtype=flow.int32),  # type: ignore
    ) -> Any:
        logits = lenet(images, dropout, view == "split")
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        optimizer.minimize(loss)
        return loss

    return job


def call(job: flow.Job, images: np.ndarray, labels: np.ndarray, ranks: int) -> np.ndarray:
    """All losses of the batch, whatever the job's view."""
    if job.view == "consistent":
        return job(images, labels)
    return np.concatenate(job(np.split(images, ranks), np.split(labels, ranks)))


def optimizer_of(name: str) -> Any:
    schedule = flow.optimizer.PiecewiseConstantScheduler([LAST_FAST], list(RATES[name]))
    return (
        flow.optimizer.SGD(schedule, momentum=0.9)
        if name == "SGD"
        else flow.optimizer.Adam(schedule)
    )


def curve(rank: int, view: str, dropout: bool, name: str, steps: int) -> list[float]:
    flow.clear_default_session()
    ranks = flow.config.world_size()
    job = job_of(view, ranks, dropout, optimizer_of(name))
    return [call(job, *batch(step % 4), ranks).mean().item() for step in range(steps)]


def plain_torch(name: str, steps: int) -> list[float]:
    """The same model in torch.nn, started from the values that the job's variables have."""
    flow.clear_default_session()
    torch.manual_seed(0)  # as the pool's ranks do
    job = job_of("consistent", 1, False, optimizer_of(name))
    job(*batch(0))
    flow.train.CheckPoint().init()
    values = {n: v.value.full() for n, v in flow.session.variables.items()}
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 5, padding=2), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(4, 6, 5, padding=2), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(24, 16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES),
    ).double()  # fmt: skip
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), values.values(), strict=True):
            parameter.copy_(value)
    optimizer = (
        torch.optim.SGD(net.parameters(), momentum=0.9)
        if name == "SGD"
        else torch.optim.Adam(net.parameters())
    )
    found = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATES[name][step > LAST_FAST]
        images, labels = (torch.from_numpy(x) for x in batch(step % 4))
        loss = F.cross_entropy(net(images), labels.long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("ranks", ON_ONE_AXIS)
@pytest.mark.parametrize("view", ["consistent", "mirrored", "split"])
def test_lenet_has_the_losses_of_plain_torch(view: str, ranks: int) -> None:
    steps = 100 if ALL else 50
    expected = plain_torch("SGD", steps)
    assert expected[-1] < expected[0] / 2
    for found in pool(ranks).run(curve, view, False, "SGD", steps):
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("view", ["consistent", "mirrored", "split"])
def test_adam_has_the_losses_of_plain_torch(view: str) -> None:
    for found in pool(2).run(curve, view, False, "Adam", 6):
        assert found == pytest.approx(plain_torch("Adam", 6), abs=1e-6)


@pytest.mark.parametrize("ranks", ON_ONE_AXIS)
def test_dropout_draws_the_same_under_both_views_and_on_any_number_of_ranks(ranks: int) -> None:
    torch.manual_seed(0)
    expected = curve(0, "consistent", True, "SGD", 5)
    for view in ("consistent", "mirrored"):
        for found in pool(ranks).run(curve, view, True, "SGD", 5):
            assert found == pytest.approx(expected, abs=1e-9)


def curve_on_two(rank: int) -> list[float]:
    flow.clear_default_session()
    flow.config.cpu_device_num(2)
    job = job_of("consistent", 2, True, optimizer_of("SGD"))
    return [job(*batch(step)).mean().item() for step in range(3)]


def test_ranks_beyond_the_devices_of_a_job_follow_it_and_get_its_results() -> None:
    torch.manual_seed(0)
    expected = curve(0, "consistent", True, "SGD", 3)
    for found in pool(3).run(curve_on_two):
        assert found == pytest.approx(expected, abs=1e-9)


# -- what a job takes and gives ------------------------------------------------------------------


def predictions(rank: int) -> Any:
    flow.clear_default_session()

    @flow.global_function(type="predict")
    def new(x: tp.Numpy.Placeholder((6, 2))) -> tp.Numpy:
        return x * 2

    @flow.global_function(flow.function_config())
    def old(x: Any = flow.FixedTensorDef((6, 2), dtype=flow.float, name="x")) -> Any:  # noqa: B008
        return x * 2, x.sum()

    @flow.global_function(flow.function_config())
    def parts(x: Any = flow.MirroredTensorDef((3, 2))) -> Any:  # noqa: B008
        return x * 2

    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    doubled, total = old(torch.from_numpy(x)).get()
    return (
        [np.array_equal(y, x * 2) for y in (new(x), new(x).get().numpy(), doubled.ndarray())],
        [float(total), new(x).mean()],
        [
            np.array_equal(np.concatenate(y), x * 2)
            for y in (parts(np.split(x, 2)), parts(np.split(x, 2)).get().ndarray_list())
        ],
        [isinstance(new(x), tp.Numpy), isinstance(parts(np.split(x, 2)), tp.ListNumpy)],
    )


def test_results_are_arrays_of_the_whole_or_of_each_part_in_old_and_new_spelling() -> None:
    for equal, numbers, lists, types in pool(2).run(predictions):
        assert all(equal) and all(lists) and all(types)
        assert numbers == [66.0, 11.0]


def shared_by_views(rank: int) -> Any:
    """A model trained under one view, read under the other."""
    flow.clear_default_session()
    schedule = flow.optimizer.PiecewiseConstantScheduler([], [0.1])
    config = flow.function_config()
    config.default_data_type(flow.double)

    @flow.global_function(type="train", function_config=config)
    def train(x: tp.ListNumpy.Placeholder((2, 3), dtype=flow.double)) -> tp.ListNumpy:
        y = flow.layers.dense(x, 1, name="d")
        flow.optimizer.SGD(schedule).minimize(y)
        return y

    @flow.global_function(type="predict", function_config=config)
    def predict(x: tp.Numpy.Placeholder((4, 3), dtype=flow.double)) -> tp.Numpy:
        return flow.layers.dense(x, 1, name="d")

    x = np.ones((4, 3))
    before = predict(x)
    train(np.split(x, 2))
    # Each of the 3 weights and the bias has the gradient 1.
    return float((predict(x) - before).max())


def test_a_job_of_one_view_sees_what_a_job_of_the_other_has_learnt() -> None:
    for change in pool(2).run(shared_by_views):
        assert change == pytest.approx(-0.4, abs=1e-14)


def older_training(rank: int) -> list[float]:
    flow.clear_default_session()
    config = flow.function_config()
    config.train.primary_lr(0.5)
    config.train.model_update_conf({"momentum_conf": {"beta": 0.0}})

    @flow.global_function(config)
    def train(x: Any = flow.FixedTensorDef((4,))) -> Any:  # noqa: B008
        w = flow.get_variable("w", (1,), initializer=flow.ones_initializer())
        flow.losses.add_loss(w * x)
        flow.losses.add_loss(w * x)
        return w

    return [float(train(np.ones(4, np.float32)).get().ndarray()[0]) for _ in range(3)]


def test_added_losses_are_minimised_by_what_the_config_says() -> None:
    assert pool(2).run(older_training) == [[1.0, 0.0, -1.0]] * 2


# -- errors, on every rank -----------------------------------------------------------------------


def fault(rank: int, what: str) -> str:
    flow.clear_default_session()
    images, labels = batch(0)
    good, job = [images, labels], job_of("consistent", 2, False, optimizer_of("SGD"))
    try:
        match what:
            case "shape":
                job(images[:5], labels)
            case "dtype":
                job(images, labels.astype(np.int64))
            case "one rank":
                job(images, labels if rank == 0 else labels[:3])
            case "missing":
                job(images)
            case "kind":
                job(images.tolist(), labels)
            case "list":
                job([images], labels)
            case "other view":
                with flow.scope.mirrored_view():
                    flow.global_function(type="predict")(taking_whole)(*good)
            case "length":
                job_of("mirrored", 2, False, optimizer_of("SGD"))(
                    np.split(images, 3), np.split(labels, 3)
                )
            case "parts":
                uneven = [images[:5], images[5:]]
                job_of("mirrored", 2, False, optimizer_of("SGD"))(uneven, np.split(labels, 2))
            case "no list":
                job_of("mirrored", 2, False, optimizer_of("SGD"))(images, labels)
            case "devices":
                flow.config.cpu_device_num(3)
            case "placement":
                with flow.scope.placement("cpu", "0:2"):
                    job(*good)
            case "machine":
                flow.scope.placement("cpu", "1:0")
            case "no loss":
                flow.global_function(type="train")(taking_whole)(*good)
            case "split":
                job(*good)
                train = flow.global_function(type="predict")(wanting_copies)
                flow.get_variable("s", (4, 4), distribute=flow.distribute.split(0))
                train(np.split(np.ones((4, 4), np.float32), 2))
            case "no job":
                flow.layers.dense(torch.ones(2, 2), 3)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def taking_whole(
    images: tp.Numpy.Placeholder((BATCH, 1, 8, 8), dtype=flow.double),
    labels: tp.Numpy.Placeholder((BATCH,), dtype=flow.int32),
) -> Any:
    return images


def wanting_copies(x: tp.ListNumpy.Placeholder((2, 4))) -> Any:
    return x + flow.get_variable("s").sum()


FAULTS = {
    "shape": "job: images has shape (5, 1, 8, 8), and its placeholder says (12, 1, 8, 8)",
    "dtype": "job: labels is torch.int64, and its placeholder says torch.int32.",
    "one rank": "job: on rank 1, labels has shape (3,), and its placeholder says (12,)",
    "missing": "job: missing a required argument: 'labels'",
    "kind": "job: images is a list, and its placeholder says torch.float64",
    "list": "job: images is a list",
    "other view": "images is a placeholder of the consistent view",
    "length": "job: images has 3 parts, and the job runs on 2 devices",
    "parts": "job: images[0] has shape (5, 1, 8, 8), and its placeholder says (6, 1, 8, 8)",
    "no list": "job: images is one float64 of shape (12, 1, 8, 8), and the job runs on 2 devices",
    "devices": "config.cpu_device_num: 3 devices are asked for, and the program runs on 2 ranks",
    "placement": "'0:2' names machine 0, devices 2 to 2, and the program runs on 1 machines",
    "machine": "'1:0' names machine 1",
    "no loss": "it is of type train, and no loss was given",
    "split": "'s' is S(0), and a job under the mirrored view asks for it",
    "no job": "layers.dense without a name: no job is running",
}


@pytest.mark.parametrize("what", FAULTS)
def test_clear_error_on_every_rank(what: str) -> None:
    for text in pool(2).run(fault, what):
        assert FAULTS[what] in text


def test_a_job_alone_that_names_more_devices_says_how_many_there_are() -> None:
    config = flow.function_config()
    config.default_placement_scope(flow.scope.PlacementScope(flow.placement("cpu", [0, 1])))
    with pytest.raises(ValueError, match="the world has 1 ranks: rank 1 is not there"):
        flow.global_function(type="predict", function_config=config)(taking_whole)(*batch(0))
