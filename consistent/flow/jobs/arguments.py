"""Check the arguments of a job against their declarations, and put them on the job's devices."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

import mirrored
from mirrored.every_rank import agree, alike
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
            found = [
                p for p in (parameter.annotation, parameter.default) if isinstance(p, Placeholder)
            ]
            if not found:
                raise TypeError(
                    f"{job}: argument {name} has no placeholder.\n"
                    "  A job's arguments say what shape and dtype they have.\n"
                    f"  Write {name}: typing.Numpy.Placeholder(shape, dtype), or "
                    "typing.ListNumpy.Placeholder."
                )
            self.placeholders[name] = found[0]
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
        given: dict[str, Any] = {}
        try:
            given = self._signature.bind(*args, **kwargs).arguments
            for name, placeholder in self.placeholders.items():
                given[name] = _checked(name, given[name], placeholder, view, placement)
            fault = ""
        except (TypeError, ValueError) as error:
            fault = str(error)
        self._agree(fault)
        # After the agreement: placing communicates, and every rank must get here.
        return [_placed(given[n], p, view, placement) for n, p in self.placeholders.items()]

    def _agree(self, fault: str) -> None:
        """Raise ValueError on every rank if the arguments are wrong on any rank. A collective.

        ``fault`` says what is wrong with the arguments on this rank; "" if nothing is. If a rank
        raised alone, the other ranks would wait for it.
        """

        def failed(faults: list[str]) -> ValueError:
            rank, text = next((rank, text) for rank, text in enumerate(faults) if text)
            where = "" if alike(faults) else f"on rank {rank}, "
            return ValueError(f"{self.job}: {where}{text}")

        agree(fault, failed, fits=lambda faults: not any(faults))


def _checked(name: str, value: Any, at: Placeholder, view: ViewName, placement: Placement) -> Any:
    if at.view != view:
        right = "typing.Numpy" if view == "consistent" else "typing.ListNumpy"
        raise ValueError(
            f"{name} is a placeholder of the {at.view} view, and the job runs under the {view} "
            "view.\n"
            "  The consistent view takes whole batches, the mirrored view lists of parts.\n"
            f"  Declare it as {right}.Placeholder, or set config.default_logical_view."
        )
    if view == "consistent":
        return _fitting(name, value, at)
    if isinstance(value, MirroredTensor):
        return _fitting(name, value, at)
    if not isinstance(value, list | tuple) or len(value) != placement.size:
        found = (
            f"has {len(value)} parts" if isinstance(value, list | tuple) else f"is {_kind(value)}"
        )
        raise ValueError(
            f"{name} {found}, and the job runs on {placement.size} devices.\n"
            "  Under the mirrored view an argument is a list with one part for each device.\n"
            f"  Cut the batch into {placement.size} parts."
        )
    return [_fitting(f"{name}[{k}]", part, at) for k, part in enumerate(value)]


def _fitting(name: str, value: Any, at: Placeholder) -> torch.Tensor:
    if not isinstance(value, torch.Tensor | np.ndarray | np.generic):
        raise ValueError(
            f"{name} is {_kind(value)}, and its placeholder says {at.dtype} {at.shape}.\n"
            "  Arguments are numpy arrays or tensors.\n"
            "  Convert it: np.asarray(x)."
        )
    # A view into a read-only array would make torch warn; an argument is never written to.
    local = value if isinstance(value, torch.Tensor) else np.require(value, requirements=["C", "W"])
    x = local if isinstance(local, torch.Tensor) else torch.from_numpy(local)
    if tuple(x.shape) != at.shape:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, and its placeholder says {at.shape}.\n"
            "  A job is made for one shape.\n"
            "  Leave incomplete batches out, or make a job for that shape too."
        )
    if x.dtype != at.dtype:
        raise ValueError(
            f"{name} is {x.dtype}, and its placeholder says {at.dtype}.\n"
            "  A job is made for one dtype.\n"
            f'  Convert it: {name}.astype("{str(at.dtype).removeprefix("torch.")}").'
        )
    return x


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"one {value.dtype} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _placed(value: Any, at: Placeholder, view: ViewName, placement: Placement) -> Any:
    device = None if placement.type == "cpu" else torch.device(placement.type)
    if isinstance(value, GlobalTensor | MirroredTensor):
        return value
    if view == "mirrored":
        return mirrored.scatter(value, placement.ranks.ravel().tolist(), device=device)
    sbp = B if at.batch_axis is None else S(at.batch_axis)
    return distribute(value, placement, (sbp,) * placement.ndim, check=check_mode.enabled)
