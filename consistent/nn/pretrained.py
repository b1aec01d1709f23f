"""Load a model from safetensors files, of which each rank reads only its slices.

```
model.safetensors      w  f32[4096, 4096]
rank 0 of 2, S(0)      reads rows 0 to 2047         memory: its shards and the slice that it reads
rank 1 of 2, S(0)      reads rows 2048 to 4095
```
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..dispatch.plans.shards import is_global, plain
from ..movement.run import run
from ..movement.world import device_of, my_coordinate
from ..spec import Placement
from .deferred import check_attributes, initialise
from .parallelize import parallelize

_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def from_pretrained(
    cls: Callable[..., nn.Module],
    folder: str | Path,
    placement: Placement | None = None,
    plan: Any = None,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """Return a model with the weights in ``folder``, laid out as ``plan`` says.

    No rank ever holds more than its shards and the slice that it reads.

    Args:
        cls: a model class of transformers, or a function without arguments that makes the module.
        folder: a folder on every rank, with ``model.safetensors``, or with
            ``model.safetensors.index.json`` and the files that it names; for transformers also with
            ``config.json``.
        placement: the placement of all tensors, as in ``parallelize``.
        plan: the layouts, as in ``parallelize``.
        dtype: the dtype of the parameters; by default that of the configuration, or that in which
            the module is made.
        options: further arguments of ``parallelize``.

    Returns:
        The module, in ``eval`` mode. Tensors that the files lack are initialised, with a warning
        that names them.

    Raises:
        FileNotFoundError: the folder has no safetensors files.
        ValueError: a shape differs, or the files hold the weights under other names, which
            transformers would convert.
    """
    folder = Path(folder)
    files = _file_of_each_tensor(folder)
    with torch.device("meta"):
        model = _build_model(cls, folder, dtype)
    parallelize(model, placement, plan, initialise=False, **options)
    with ExitStack() as exit_stack:
        read_names, missing = _fill_from_files(model, _SafetensorsReader(files, exit_stack))
    _warn_of_differences(model, missing, set(files) - read_names)
    initialise(model, [*missing, *_unsaved_buffers(model)])
    check_attributes(model)
    _set_hf_configs(model, folder)
    return model.eval()


def _file_of_each_tensor(folder: Path) -> dict[str, Path]:
    """Return the file of each saved tensor, by the tensor's name.

    Raises:
        FileNotFoundError: the folder has no safetensors files.
    """
    from safetensors import safe_open

    index, single_file = folder / _INDEX_FILE, folder / _SINGLE_FILE
    if index.exists():
        # Imported here: it imports torch's distributed checkpoints, as slow as this whole library.
        from ..checkpoint.files.foreign import weight_map

        return {name: folder / file for name, file in weight_map(str(index)).items()}
    if not single_file.is_file():
        file_names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        raise FileNotFoundError(
            f"from_pretrained: {folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}; "
            + (f"it holds {', '.join(file_names[:8])}. " if file_names else "it is not a folder. ")
            + "Save the model with save_pretrained(folder), which writes safetensors files."
        )
    with safe_open(single_file, framework="pt") as file:
        return dict.fromkeys(file.keys(), single_file)


class _SafetensorsReader:
    """Reader of tensors in safetensors files, which opens each file once.

    Args:
        files: name of a tensor -> its file.
        exit_stack: the stack of contexts whose end closes the files.
    """

    def __init__(self, files: Mapping[str, Path], exit_stack: ExitStack) -> None:
        self.files, self._exit_stack = files, exit_stack
        self._open_files: dict[Path, Any] = {}

    def part(self, name: str, starts: Iterable[int], sizes: Iterable[int]) -> torch.Tensor:
        """Read the region of the tensor ``name`` that begins at ``starts`` and has ``sizes``.

        Only this region is read from the file: starts (8, 0), sizes (4, 6) are ``[8:12, 0:6]``.
        """
        ranges = tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
        file = self._open_file(name)
        return file.get_slice(name)[ranges] if ranges else file.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor ``name`` in its file."""
        return tuple(self._open_file(name).get_slice(name).get_shape())

    def _open_file(self, name: str) -> Any:
        from safetensors import safe_open

        path = self.files[name]
        if path not in self._open_files:
            self._open_files[path] = self._exit_stack.enter_context(safe_open(path, framework="pt"))
        return self._open_files[path]


def _build_model(cls: Any, folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """Return the model: of transformers by the configuration in ``folder``, or else ``cls()``."""
    if hasattr(cls, "config_class") and hasattr(cls, "_from_config"):
        config = cls.config_class.from_pretrained(folder)
        return cls._from_config(config, **({} if dtype is None else {"dtype": dtype}))
    model = cls()
    return model if dtype is None else model.to(dtype)


def _fill_from_files(model: nn.Module, files: _SafetensorsReader) -> tuple[set[str], list[str]]:
    """Fill the tensors of the model's state from the files.

    Returns:
        the names in the files that were read, and the names in the model that no file has.
    """
    places: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, x in state.items():
        if isinstance(x, torch.Tensor):
            places.setdefault(id(x), []).append(name)
    read_names: set[str] = set()
    missing = []
    for names in places.values():
        saved_names = [
            key for name in names if (key := _saved_name(model, name, files.files)) is not None
        ]
        read_names.update(saved_names)
        if saved_names:
            _fill_shard(state[names[0]], names[0], saved_names[0], files)
        else:
            missing.append(names[0])
    return read_names, missing


def _saved_name(model: Any, name: str, files: Mapping[str, Path]) -> str | None:
    """Return the name that the files have for the model's tensor ``name``; None if there is none.

    A model may be saved with or without its head, so the prefix of the base model may differ:
    ``wte.weight`` and ``transformer.wte.weight`` are tried for each other.
    """
    prefix = getattr(model, "base_model_prefix", "")
    candidates = [name]
    if prefix:
        candidates += [f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]
    return next((candidate for candidate in candidates if candidate in files), None)


@torch.no_grad()
def _fill_shard(x: Any, name: str, key: str, files: _SafetensorsReader) -> None:
    """Read this rank's part of a saved tensor into the shard of ``x``.

    Args:
        x: the global tensor of the model.
        name: its name in the model, for the error.
        key: its name in the files.
        files: the files.

    Raises:
        ValueError: the shape in the file differs.
    """
    shape = files.shape(key)
    if shape != tuple(x.shape):
        raise ValueError(
            f"from_pretrained: {name!r} is {tuple(x.shape)} in the model, and {key!r} in "
            f"{files.files[key]} is {shape}. Use the configuration that was saved with the "
            "weights."
        )
    at = my_coordinate(x._spec.placement)
    if at is not None:
        starts, sizes = x._spec.plain.region(at)
        part = files.part(key, starts, sizes)
        if x._spec.layout.is_cut:  # the shard is no contiguous region: read one, then box it
            part = run(part.to(device_of(x._spec.placement), x.dtype), x._spec.plain, x._spec)
        plain(x).detach().copy_(part)


def _unsaved_buffers(model: nn.Module) -> list[str]:
    """Return the names of global buffers that the state_dict lacks, such as position tables."""
    state = {id(x) for x in model.state_dict(keep_vars=True).values()}
    return [n for n, x in model.named_buffers() if id(x) not in state and is_global(x)]


def _warn_of_differences(model: Any, missing: list[str], unexpected: set[str]) -> None:
    """Warn of tensors that the files lack, and of those in the files that the model has not.

    Raises:
        ValueError: there are both, and transformers would convert the one to the other.
    """
    missing = _without_ignored(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
    unused_names = _without_ignored(
        sorted(unexpected), getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    )
    if missing and unused_names and _has_weight_conversion(model):
        raise ValueError(
            f"from_pretrained: {type(model).__name__} holds its weights in another layout than "
            f"its files: they lack {_first_names(missing)}, and have {_first_names(unused_names)}. "
            f"Load it by {type(model).__name__}.from_pretrained(folder), save_pretrained with "
            "save_original_format=False once, and load that folder."
        )
    if missing:
        warnings.warn(
            f"from_pretrained: the files have no {_first_names(missing)}: newly initialised.",
            stacklevel=3,
        )
    if unused_names:
        warnings.warn(
            f"from_pretrained: the model has no place for {_first_names(unused_names)}: not used.",
            stacklevel=3,
        )


def _has_weight_conversion(model: Any) -> bool:
    """Return whether transformers converts the names or layouts of this model's saved weights."""
    if not hasattr(model, "config"):
        return False
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return bool(get_checkpoint_conversion_mapping(getattr(model.config, "model_type", "")))


def _without_ignored(names: list[str], ignored: Iterable[str] | None) -> list[str]:
    """Return ``names`` without those that a regular expression in ``ignored`` matches."""
    return [n for n in names if not any(re.search(pattern, n) for pattern in ignored or ())]


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(map(repr, names[:6])) + more


def _set_hf_configs(model: Any, folder: Path) -> None:
    """Set the name and the generation config of a transformers model, as its own loader does."""
    if hasattr(model, "config") and hasattr(model, "can_generate"):
        model.config._name_or_path = str(folder)
        if model.can_generate() and (folder / "generation_config.json").exists():
            from transformers import GenerationConfig

            model.generation_config = GenerationConfig.from_pretrained(folder)
