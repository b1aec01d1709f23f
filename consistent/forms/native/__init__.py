"""Native (C++ and CUDA) ops of csrc/.

Importing this loads and checks the build; ``load`` has typed wrappers.
"""

from mirrored.native import load_build

load_build(__name__)  # registers torch.ops.consistent
