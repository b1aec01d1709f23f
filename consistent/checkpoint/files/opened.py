"""Opening of a checkpoint in any supported format."""

from __future__ import annotations

import os

from . import dcp, foreign
from . import index as index_file
from .reader import Reader, open_own_format


def opened(path: str) -> Reader:
    """Return a reader of the checkpoint at ``path``, a file or folder of any supported format.

    Raises:
        FileNotFoundError: there is no checkpoint at ``path``.
        ValueError: the checkpoint is damaged.
    """
    if os.path.isfile(os.path.join(path, index_file.NAME)):
        return open_own_format(path)
    if os.path.isfile(os.path.join(path, dcp.NAME)):
        return dcp.open_dcp_folder(path)
    if foreign.is_safetensors(path):
        return foreign.open_safetensors(path)
    if os.path.isfile(path):
        return foreign.open_torch_file(path)
    raise FileNotFoundError(
        f"{path} holds no checkpoint: no {index_file.NAME}, which save writes last, no "
        f"{dcp.NAME} of torch.distributed.checkpoint, and no .safetensors. A save that "
        "was killed leaves nothing that can be read."
    )
