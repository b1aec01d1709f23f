"""Check the arguments of a job against their declarations, and put them on the job's devices."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

import mirrored
from mirrored.every_rank import agree, all_equal
from mirrored.mirrored_tensor import MirroredTensor

from ...movement import check_mode
from ...spec import B, Placement, S
from ...tensor.global_tensor import GlobalTensor
from ...tensor.making.create import distribute
from ..scope import ViewName
from ..typing import Placeholder


class Arguments:
    """The declared arguments of a job, by which the arguments of its calls are checked.

    Each argument in ``signature`` has a placeholder, which declares its shape and dtype, as its
    annotation or default value. ``job`` is the job's name. Raises TypeError if an argument has no
    placeholder.
    """

    def __init__(self, job: str, signature: inspect.Signature):
        self.job = job
        self.placeholders: dict[str, Placeholder] = {}
        for name, parameter in signature.parameters.items():
            candidates = [
                p for p in (parameter.annotation, parameter.default) if isinstance(p, Placeholder)
            ]
            if not candidates:
                raise TypeError(
                    f"{job}: argument {name} has no placeholder.\n"
                    "  A job's arguments say what shape and dtype they have.\n"
                    f"  Write {name}: typing.Numpy.Placeholder(shape, dtype), or "
                    "typing.ListNumpy.Placeholder."
                )
            self.placeholders[name] = candidates[0]
        empty = inspect.Parameter.empty
        self._signature = inspect.Signature(
            [p.replace(default=empty, annotation=empty) for p in signature.parameters.values()]
        )

    @property
    def view(self) -> ViewName | None:
        """Name of the placeholders' view: "consistent" or "mirrored"; None without arguments.

        The view says whether a job takes whole batches or a list with one part for each device.
        """
        for placeholder in self.placeholders.values():
            return placeholder.view
        return None

    def read(self, args: tuple, kwargs: dict, view: ViewName, placement: Placement) -> list[Any]:
        """Check the arguments of a call, and put them on the devices of ``placement``.

        Returns them in order, as global tensors in the view "consistent", and as mirrored tensors
        in the view "mirrored". A collective of the world.

        Raises:
            ValueError: on every rank, if on any rank an argument does not match its placeholder.
        """
        values: dict[str, Any] = {}
        try:
            values = self._signature.bind(*args, **kwargs).arguments
            for name, placeholder in self.placeholders.items():
                values[name] = _check_argument(name, values[name], placeholder, view, placement)
            fault = ""
        except (TypeError, ValueError) as error:
            fault = str(error)
        self._raise_on_every_rank(fault)
        # After the agreement: placing communicates, and every rank must get here.
        return [
            _place_argument(values[n], p, view, placement) for n, p in self.placeholders.items()
        ]

    def _raise_on_every_rank(self, fault: str) -> None:
        """Raise ValueError on every rank if the arguments are wrong on any rank. A collective.

        ``fault`` says what is wrong with the arguments on this rank; "" if nothing is. If a rank
        raised alone, the other ranks would wait for it.
        """

        def make_error(faults: list[str]) -> ValueError:
            rank, text = next((rank, text) for rank, text in enumerate(faults) if text)
            where = "" if all_equal(faults) else f"on rank {rank}, "
            return ValueError(f"{self.job}: {where}{text}")

        agree(fault, make_error, fits=lambda faults: not any(faults))


def _check_argument(
    name: str, value: Any, placeholder: Placeholder, view: ViewName, placement: Placement
) -> Any:
    if placeholder.view != view:
        expected = "typing.Numpy" if view == "consistent" else "typing.ListNumpy"
        raise ValueError(
            f"{name} is a placeholder of the {placeholder.view} view, and the job runs under the "
            f"{view} view.\n"
            "  The consistent view takes whole batches, the mirrored view lists of parts.\n"
            f"  Declare it as {expected}.Placeholder, or set config.default_logical_view."
        )
    if view == "consistent":
        return _check_tensor(name, value, placeholder)
    if isinstance(value, MirroredTensor):
        return _check_tensor(name, value, placeholder)
    if not isinstance(value, list | tuple) or len(value) != placement.size:
        problem = (
            f"has {len(value)} parts"
            if isinstance(value, list | tuple)
            else f"is {_describe(value)}"
        )
        raise ValueError(
            f"{name} {problem}, and the job runs on {placement.size} devices.\n"
            "  Under the mirrored view an argument is a list with one part for each device.\n"
            f"  Cut the batch into {placement.size} parts."
        )
    return [_check_tensor(f"{name}[{k}]", part, placeholder) for k, part in enumerate(value)]


def _check_tensor(name: str, value: Any, placeholder: Placeholder) -> torch.Tensor:
    if not isinstance(value, torch.Tensor | np.ndarray | np.generic):
        raise ValueError(
            f"{name} is {_describe(value)}, and its placeholder says {placeholder.dtype} "
            f"{placeholder.shape}.\n"
            "  Arguments are numpy arrays or tensors.\n"
            "  Convert it: np.asarray(x)."
        )
    # A view into a read-only array would make torch warn; an argument is never written to.
    local = value if isinstance(value, torch.Tensor) else np.require(value, requirements=["C", "W"])
    x = local if isinstance(local, torch.Tensor) else torch.from_numpy(local)
    if tuple(x.shape) != placeholder.shape:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, and its placeholder says {placeholder.shape}.\n"
            "  A job is made for one shape.\n"
            "  Leave incomplete batches out, or make a job for that shape too."
        )
    if x.dtype != placeholder.dtype:
        raise ValueError(
            f"{name} is {x.dtype}, and its placeholder says {placeholder.dtype}.\n"
            "  A job is made for one dtype.\n"
            f'  Convert it: {name}.astype("{str(placeholder.dtype).removeprefix("torch.")}").'
        )
    return x


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"one {value.dtype} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _place_argument(
    value: Any, placeholder: Placeholder, view: ViewName, placement: Placement
) -> Any:
    device = None if placement.type == "cpu" else torch.device(placement.type)
    if isinstance(value, GlobalTensor | MirroredTensor):
        return value
    if view == "mirrored":
        return mirrored.scatter(value, placement.ranks.ravel().tolist(), device=device)
    sbp = B if placeholder.batch_axis is None else S(placeholder.batch_axis)
    return distribute(value, placement, (sbp,) * placement.ndim, check=check_mode.enabled)
