"""Jobs: functions with declared arguments that run on many devices.

They are called with numpy arrays or tensors. A declaration of an argument is a *placeholder*.

```
                   arguments              in the function    results
consistent view    whole batch  --split-> global tensors    --join-> whole arrays
mirrored view      list of parts --own--> mirrored tensors  --all--> lists of arrays
```

In the mirrored view each rank takes its own part of the list, and results are gathered from all.

Every rank calls the job with the same arguments and gets the same results. At the end of its
function, a job of type "train" takes one optimizer step. Under either view, the gradients of this
step are those of the sum of the losses, each averaged over the whole batch.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch

from mirrored import DataParallel

from ...spec import Placement
from .. import config as devices
from .. import session
from ..ops.micro_batches import MicroBatches, pack
from ..scope import ViewName, current_view
from ..session import JobRun, Minimizer
from .arguments import Arguments
from .function_config import FunctionConfig
from .results import to_numpy

Kind = Literal["train", "predict"]


def global_function(
    type: Kind | FunctionConfig | None = None,  # noqa: A002  (the documents' name)
    function_config: FunctionConfig | None = None,
) -> Callable[[Callable[..., Any]], Job]:
    """Return a decorator that makes a function a job.

    A job is called with whole batches or lists of parts, and runs on all devices:

    ```
    @flow.global_function(type="predict")
    def classify(images: flow.typing.Numpy.Placeholder((100, 784))):
        return flow.layers.dense(images, 10)
    ```

    Args:
        type: "train" or "predict". In the older form this is the ``function_config``, and the job
            trains if the config has a learning rate.
        function_config: the dtype of variables, the view (whole batches or one part per device) and
            the placement.
    """
    if isinstance(type, FunctionConfig):
        type, function_config = None, type
    settings = function_config or FunctionConfig()
    kind: Kind = type or ("train" if settings.train.lr is not None else "predict")
    if kind not in ("train", "predict"):
        raise ValueError(
            f'global_function: type is {kind!r}, and a job is of type "train" or "predict".'
        )

    def make(function: Callable[..., Any]) -> Job:
        # Annotations as strings may name local variables of the code that defines the job.
        names = sys._getframe(1).f_locals
        return Job(
            function, inspect.signature(function, locals=names, eval_str=True), kind, settings
        )

    return make


class Job:
    """A function with declared arguments that runs on many devices; ``global_function`` makes it.

    A job of kind "train" takes an optimizer step after the function has returned, one of kind
    "predict" does not.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        signature: inspect.Signature,
        kind: Kind,
        settings: FunctionConfig,
    ):
        functools.update_wrapper(self, function)
        self.name = function.__name__
        self.kind = kind
        self.settings = settings
        self.steps = 0
        self._function = function
        self._arguments = Arguments(self.name, signature)
        self._optimizer: torch.optim.Optimizer | None = None
        self._model: _Model | None = None
        self._parallel_function: Callable[..., Any] | None = None

    @property
    def view(self) -> ViewName:
        """Name of the job's view: "consistent" (whole batches) or "mirrored" (one part per device).

        The config decides if it sets a view, else the innermost entered scope, else the
        placeholders of the arguments. The default is "consistent".
        """
        return self.settings.view or current_view() or self._arguments.view or "consistent"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        view, placement = self.view, self._placement()
        inputs = self._arguments.read(args, kwargs, view, placement)
        run = JobRun(self.name, view, placement, self.settings.dtype)
        if self.kind == "predict":
            with session.enter_run(run), torch.no_grad():
                return to_numpy(self._function(*inputs))
        call = self._function if view == "consistent" else self._data_parallel_function(run, inputs)
        with session.enter_run(run):
            result = to_numpy(call(*inputs))  # before the step: a variable may be among the results
            self._optimizer_step(run)
        return result

    # -- where ------------------------------------------------------------------------------------

    def _placement(self) -> Placement:
        placement = self.settings.placement or devices.devices()
        size = devices.world_size()
        outside = [rank for rank in placement.ranks.ravel().tolist() if rank >= size]
        if outside:
            raise ValueError(
                f"{self.name}: it is to run on {placement}, and the world has {size} ranks: rank "
                f"{outside[0]} is not there.\n"
                "  Each device is driven by one rank, which the launcher starts.\n"
                f"  Start the program with --nproc_per_node {placement.size}, or name fewer "
                "devices."
            )
        return placement

    def _data_parallel_function(self, run: JobRun, inputs: list[Any]) -> Callable[..., Any]:
        """Return the job's function as a data-parallel module, for the mirrored view.

        In it every rank has a copy of the variables, and gradients are averaged in backward. The
        first call runs the function once with ``inputs``, to find its variables.
        """
        size = devices.world_size()
        if run.placement.size != size:
            raise ValueError(
                f"{self.name}: it is to run on {run.placement.size} devices, and the world has "
                f"{size} ranks.\n"
                "  Under the mirrored view every rank has a copy of the model.\n"
                f"  Start the program with {run.placement.size} ranks, or run the job under "
                "scope.consistent_view()."
            )
        # DataParallel needs all parameters before the first real call.
        if self._model is None:
            self._model = _Model(self._function, self._create_variables(run, inputs))
            self._parallel_function = DataParallel(self._model) if size > 1 else self._model
        assert self._parallel_function is not None
        return self._parallel_function

    def _create_variables(self, run: JobRun, inputs: list[Any]) -> dict[str, torch.nn.Parameter]:
        """Run the function once to create its variables, and return the trainable ones by name.

        The results are dropped. The state of torch's random generator is restored, so that the call
        that follows draws the same numbers.
        """
        trial = JobRun(run.job, run.view, run.placement, run.dtype)
        state = torch.get_rng_state()
        with session.enter_run(trial), torch.no_grad():
            self._function(*inputs)
        torch.set_rng_state(state)
        return {n: v.seen_by(run.view) for n, v in trial.used.items() if v.trainable}

    # -- the step ---------------------------------------------------------------------------------

    def _optimizer_step(self, run: JobRun) -> None:
        description = run.optimizer or self.settings.train.optimizer()
        if not run.losses or description is None:
            problem = "no loss was given" if not run.losses else "no learning rate was set"
            raise ValueError(
                f"{self.name}: it is of type train, and {problem}.\n"
                "  A training job takes a step at its end.\n"
                "  Call optimizer.SGD(...).minimize(loss) in it, or losses.add_loss(loss) with "
                'config.train.primary_lr(...); or make it of type "predict".'
            )
        optimizer = self._optimizer_for(run, description)
        optimizer.zero_grad()
        total: Any = sum(_mean(loss) for loss in run.losses)
        total.backward()
        optimizer.step()
        self.steps += 1

    def _optimizer_for(self, run: JobRun, description: Minimizer) -> torch.optim.Optimizer:
        """Return the job's torch optimizer, with the learning rate of this step.

        It has all variables that the job has used so far: variables that are new in this call
        (``run``) are added, as one parameter group per placement. ``description`` describes the
        optimizer, which is made in the first call.
        """
        used_variables = [v for v in run.used.values() if v.trainable]
        known_ids = {id(p) for g in self._param_groups() for p in g["params"]}
        new_parameters: dict[Placement, list[Any]] = {}
        for variable in used_variables:
            parameter = variable.seen_by(run.view)
            if id(parameter) not in known_ids:
                new_parameters.setdefault(variable.value.placement, []).append(parameter)
        for parameters in new_parameters.values():
            if self._optimizer is None:
                self._optimizer = description.make(parameters)
            else:
                # A new group, so that the state of the earlier variables stays.
                self._optimizer.add_param_group({"params": parameters})
        if self._optimizer is None:
            raise ValueError(
                f"{self.name}: it is of type train, and uses no trainable variable.\n"
                "  There is nothing that a step could change.\n"
                "  Make variables with layers or get_variable(..., trainable=True)."
            )
        for group in self._param_groups():
            group["lr"] = description.lr_scheduler(self.steps)
        return self._optimizer

    def _param_groups(self) -> list[dict]:
        return self._optimizer.param_groups if self._optimizer else []


class _Model(torch.nn.Module):
    """Module around a job's function, so that DataParallel can average the gradients.

    ``variables`` are the function's trainable variables, by name.
    """

    def __init__(self, function: Callable[..., Any], variables: dict[str, torch.nn.Parameter]):
        super().__init__()
        self._function = function
        self._variables = torch.nn.ParameterList(variables.values())
        self._names = frozenset(variables)

    def forward(self, *inputs: Any) -> Any:
        result = self._function(*inputs)
        run = session.require_run("job")
        late_names = [n for n, v in run.used.items() if v.trainable and n not in self._names]
        if late_names:
            raise RuntimeError(
                f"{run.job}: variable {late_names[0]!r} was made after the job's first call.\n"
                "  Under the mirrored view the copies are kept equal for the variables of the "
                "first call.\n"
                "  Use the same variables at every call."
            )
        return result


def _mean(loss: Any) -> Any:
    full_loss = pack(loss, len(loss)) if isinstance(loss, MicroBatches) else loss
    return full_loss.mean()
