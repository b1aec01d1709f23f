"""Protection of the directory in which torch caches Inductor's code, since its content is executed.

The default directory has a predictable name and lies where all users can write
(`/tmp/torchinductor_<user>`), so another user may create it first and put code into it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from pathlib import Path

from mirrored.readable import escape_invisible
from mirrored.transports.tuning import own_files

CACHE_DIR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # torch's environment variable


def use_own_folder() -> None:
    """Make torch cache compiled code in a directory that only this user can write to.

    If that does not hold for the present cache directory, a new temporary one replaces it, with a
    warning. Results do not depend on the directory.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        folder = cache_dir()
    except OSError:  # the path is a file, or the folder cannot be created
        folder = os.environ[CACHE_DIR_VARIABLE]
    if own_files.is_own_folder(Path(folder)):
        return
    # mkdtemp makes a folder that only this user can access.
    own_folder_path = tempfile.mkdtemp(prefix="consistent-compiled-")
    atexit.register(shutil.rmtree, own_folder_path, ignore_errors=True)
    os.environ[CACHE_DIR_VARIABLE] = own_folder_path
    warnings.warn(
        f"consistent.compile: {escape_invisible(folder)}, where torch keeps compiled code, is not "
        "a folder of this user's, or others may write in it.\n"
        "  Nothing of it is read: steps are compiled again in each process.\n"
        f"  Set {CACHE_DIR_VARIABLE} to a folder of your own, or `chmod o-w` it.",
        stacklevel=2,
    )
