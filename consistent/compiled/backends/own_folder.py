"""The folder in which torch keeps what Inductor has compiled: code that is loaded and run.

Its name can be guessed, and by default it lies where all users write (`/tmp/torchinductor_<user>`):
another one may make it first.
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

SETTING = "TORCHINDUCTOR_CACHE_DIR"  # torch's own


def use_own_folder() -> None:
    """Give torch a new folder, until the process ends, if another user could have put code into the
    one that it would use. The code is the same, so what a step computes does not depend on it."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        folder = cache_dir()
    except OSError:  # a file lies there, or it may not be made
        folder = os.environ[SETTING]
    if own_files.is_own_folder(Path(folder)):
        return
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
