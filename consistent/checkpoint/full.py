"""The whole state of a module on one rank, for a file that any tool can read."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from mirrored.transports.default import current

from ..dispatch.plans.shards import is_global, plain
from ..spec import B, Placement
from .agreement import on_every_rank
from .files.pieces import bytes_of, header_of, write_all
from .saving import owner


def full_state_dict(module: torch.nn.Module, *, rank: int = 0) -> dict[str, Any]:
    """Gather the state dict of a module on one rank, as whole plain CPU tensors.

    A collective of all ranks of the world.

    ```
    whole = full_state_dict(model)
    if rank == 0:
        torch.save(whole, "model.pt")                            # or safetensors.torch.save_file
        model.save_pretrained("out", state_dict=whole)           # of transformers
    ```

    Tensors are gathered to that rank one after the other; no other rank holds more than its shards
    and its message for one tensor. Tied tensors stay one tensor.

    Args:
        module: a module with global or plain parameters.
        rank: the rank that gets the state dict.

    Returns:
        The state dict on that rank, an empty one on all others. Its tensors are copies, whatever
            layout the module has, so later training does not change them.
    """
    state_dict: dict[str, Any] = {}
    for name, value in _whole_entries(module, rank):
        if current().rank == rank:
            state_dict[name] = value
    return state_dict


def save_full(module: torch.nn.Module, path: str | os.PathLike, *, rank: int = 0) -> None:
    """Write the whole, unsharded state of a module into one file.

    A collective of all ranks of the world.

    Args:
        module: a module with global or plain parameters.
        path: ``.safetensors``, written tensor by tensor, so that no rank holds the whole module; or
            another name, for a file of ``torch.save``. The file appears under this name when it is
            complete.
        rank: the rank that writes it.

    Raises:
        CheckpointError: that rank cannot write the file, or another job is writing it; raised on
            all ranks.
    """
    target = os.fspath(path)
    write = _write_safetensors if target.endswith(".safetensors") else _write_torch_file
    what, unfinished, mark = f"checkpoint.save_full to {target!r}", *_temporary_paths(target)
    writes = current().rank == rank
    on_every_rank(what, lambda: owner.claim(mark) if writes else None)
    try:
        fault = write(module, unfinished, rank)

        def finish() -> None:
            if fault is not None:
                raise fault
            if writes:
                os.replace(unfinished, target)

        on_every_rank(what, finish)
    finally:
        if writes:
            with suppress(OSError):  # every rank has raised the cause already
                os.remove(unfinished)
            owner.release(mark)


def _temporary_paths(target: str) -> tuple[str, str]:
    """Return the paths of two files next to ``target`` that exist while it is written.

    The first is the unfinished file, which is renamed to ``target`` in the end. The second says
    which job writes it, so that no other job does.
    """
    return f"{target}.saving", f"{target}.in-use"


def _write_torch_file(module: torch.nn.Module, path: str, rank: int) -> Exception | None:
    state_dict = full_state_dict(module, rank=rank)
    if current().rank != rank:
        return None
    try:
        with open(path, "wb") as file:
            torch.save(state_dict, file)
            file.flush()
            os.fsync(file.fileno())
    except Exception as error:
        return error
    return None


def _write_safetensors(module: torch.nn.Module, path: str, rank: int) -> Exception | None:
    """Write the tensors of a module to a safetensors file one by one, gathering each on ``rank``.

    Returns the error of the writing rank, or None. It is returned and not raised, since the other
    ranks go on gathering and would wait for this one.
    """
    state = {k: x for k, x in module.state_dict().items() if isinstance(x, torch.Tensor)}
    # Largest elements first, so that each tensor starts at a multiple of its element size.
    names = sorted(state, key=lambda k: -state[k].element_size())
    fault: list[Exception] = []
    file: Any = None

    def attempt(step: Callable[[], Any]) -> Any:
        try:
            return None if fault or current().rank != rank else step()
        except Exception as error:
            fault.append(error)

    file = attempt(lambda: open(path, "wb", buffering=0))
    header = header_of([(k, state[k].dtype, tuple(state[k].shape)) for k in names])
    attempt(lambda: write_all(file, header))
    for name in names:
        value = gather_whole(state[name], rank)
        attempt(lambda: write_all(file, bytes_of(value)))  # noqa: B023  (called at once)
    attempt(lambda: os.fsync(file.fileno()))
    if file is not None:
        file.close()
    return fault[0] if fault else None


def _whole_entries(module: torch.nn.Module, rank: int) -> Any:
    """Yield (name, whole value) of each entry of the module's state dict.

    Tensors are gathered on ``rank``, tied ones once. On other ranks the values are only
    placeholders.
    """
    seen: dict[int, Any] = {}
    # With keep_vars tied tensors are the same object, and are known by their id.
    for name, x in module.state_dict(keep_vars=True).items():
        if id(x) not in seen:
            seen[id(x)] = _gather_copy(x, rank) if isinstance(x, torch.Tensor) else x
        yield name, seen[id(x)]


# The whole value, copied if it would share storage with this rank's own tensor.
def _gather_copy(x: Any, rank: int) -> torch.Tensor:
    value, own_tensor = gather_whole(x, rank), plain(x.detach())
    shares = (
        not own_tensor.is_meta
        and value.untyped_storage()._cdata == own_tensor.untyped_storage()._cdata
    )
    return value.clone() if shares else value


@torch.no_grad()
def gather_whole(x: Any, rank: int) -> torch.Tensor:
    """Return the whole value of ``x`` as a plain CPU tensor on one rank.

    Other ranks get an empty tensor. A global tensor that is B (replicated) on a placement with that
    rank is not sent.
    """
    x = x.detach()
    if not is_global(x):
        return x.cpu() if current().rank == rank else torch.empty(0, dtype=x.dtype)
    if not (all(e.is_broadcast for e in x.sbp) and rank in x.placement.ranks):
        x = x.to_global(placement=Placement(x.placement.type, [rank]), sbp=B)
    return x.to_local().cpu() if current().rank == rank else torch.empty(0, dtype=x.dtype)
