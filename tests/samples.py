"""Importing this lets torch's database of ops give samples at once. It looks for a test of torch's
own that asks for them, and for that through all modules, for each frame of the stack; there is no
such test here."""

from __future__ import annotations

from torch.testing._internal import common_utils

common_utils.extract_test_fn = lambda: None
