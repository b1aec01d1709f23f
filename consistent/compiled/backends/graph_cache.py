"""Compilation of a graph by Inductor, with torch's caches of whole graphs.

A program that starts again, such as after a failure, then reads most of what it compiled before
from disk. Torch looks into these caches only if its tracing context has symbols for sizes, as that
of ``torch.compile`` has; so one is provided here, though all sizes are numbers.

Torch's own keys describe each input by itself. Whether inputs share memory is part of the key here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from .form import Form
from .in_order import TAG

_MAX_CONSTANT_ELEMENTS = 1 << 20  # elements, as torch makes a list of them for its key
_WITH_EFFECTS_OP = "torch.ops.higher_order.with_effects"


def compile_graph(
    graph: GraphModule, inputs: Sequence[torch.Tensor], form: Form | None
) -> Callable[..., Any]:
    """Return Inductor's code for ``graph``, whose form for ``inputs`` is ``form``.

    None stands for a graph that a form does not describe, which is not cached.
    """
    import torch.compiler.config
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    caches: Any = torch.compiler.config
    is_off = caches.force_disable_caches or not config.fx_graph_cache  # by the user
    if form is None or is_off or sum(x.numel() for x in form.constants) > _MAX_CONSTANT_ELEMENTS:
        return compile_without_cache(graph, inputs)
    key = _digest(form)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
    tag = f"{caches.cache_key_tag}; {TAG}; {key}"
    # By default torch does not cache graphs with this op, which wraps each message, since it may
    # wrap any op with effects. Here that is safe: a message's number says what the message does.
    cacheable_ops = {
        **config.unsafe_marked_cacheable_functions,
        _WITH_EFFECTS_OP: torch.__version__,
    }
    with (
        tracing(TracingContext(mode)),
        caches.patch(cache_key_tag=tag),
        config.patch(unsafe_marked_cacheable_functions=cacheable_ops),
        _wait_for_first_compiler(key),
    ):
        return compile_fx(graph, fakes)  # type: ignore[return-value]


def compile_without_cache(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return Inductor's code for ``graph``; only single kernels are cached on disk."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    with (
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
    ):
        return compile_fx(graph, list(inputs))  # type: ignore[return-value]


@contextmanager
def _wait_for_first_compiler(key: str) -> Iterator[None]:
    """Wait while another process of this host compiles the graph of this ``key``.

    So ranks with equal graphs compile them once: the first writes the cache, and the others read
    it, all at the same time. If the first dies, the system frees its lock, and they compile.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        import fcntl

        folder = Path(cache_dir(), "consistent-locks")
        folder.mkdir(exist_ok=True)
        lock = os.open(folder / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (ImportError, OSError):  # such as a full disk
        yield
        return
    try:
        with suppress(OSError):  # some file systems have no locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH)
                fcntl.flock(lock, fcntl.LOCK_UN)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough if a child was forked since
        os.close(lock)


def _digest(form: Form) -> str:
    """Return a hash of ``form`` and of the processor that the code is compiled for.

    Torch adds the values of constants.
    """
    machine = (torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    return hashlib.sha256(repr((form.text, form.numbers, machine)).encode()).hexdigest()
