"""The native ops of csrc/, loaded, checked and typed."""

from mirrored.native import load_build

load_build(__name__)  # registers torch.ops.consistent
