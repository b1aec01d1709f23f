"""The native ops of csrc/: the build is loaded and checked on import, and ``load`` has types."""

from mirrored.native import load_build

load_build(__name__)  # registers torch.ops.consistent
