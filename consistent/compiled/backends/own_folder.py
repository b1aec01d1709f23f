"""Check of the folder in which torch caches Inductor's compiled code, which is loaded and executed.

The default name is predictable, and the folder is in a directory that all users can write to
(`/tmp/torchinductor_<user>`), so another user may create it first.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from pathlib import Path

from mirrored.readable import readable
from mirrored.transports.tuning import own_files

SETTING = "TORCHINDUCTOR_CACHE_DIR"  # torch's environment variable


def use_own_folder() -> None:
    """Switch torch to a new temporary folder if another user could have put code into the present
    one. The code is the same, so results do not depend on the folder."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        folder = cache_dir()
    except OSError:  # the path is a file, or the folder cannot be created
        folder = os.environ[SETTING]
    if own_files.is_own_folder(Path(folder)):
        return
    # mkdtemp makes a folder that only this user can access.
    own = tempfile.mkdtemp(prefix="consistent-compiled-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    os.environ[SETTING] = own
    warnings.warn(
        f"consistent.compile: {readable(folder)}, where torch keeps compiled code, is not a folder "
        "of this user's, or others may write in it.\n"
        "  Nothing of it is read: steps are compiled again in each process.\n"
        f"  Set {SETTING} to a folder of your own, or `chmod o-w` it.",
        stacklevel=2,
    )
