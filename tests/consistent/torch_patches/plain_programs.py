"""Programs without global tensors: ``python plain_programs.py FOLDER none imported used`` writes
what they do, a line each, to a file of each mode's name. Nothing of it may depend on the library
being imported, or in use elsewhere in the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import os
import pickle
import pkgutil
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import as_tensor, manual_seed, tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tests.samples  # noqa: F401

ALL = os.environ.get("CONSISTENT_TEST_ALL") == "1"  # tests/ranks.py, which imports the library
Lines = Iterator[Any]
PROGRAMS: list[Callable[[], Lines]] = []


def program(function: Callable[[], Lines]) -> Callable[[], Lines]:
    PROGRAMS.append(function)
    return function


def digest(value: Any) -> str:
    """What is in tensors and other leaves, to the bit."""
    found = hashlib.sha256()
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)} {leaf.requires_grad}".encode())
            found.update(_bytes(leaf))
        else:
            found.update(re.sub("0x[0-9a-f]+", "", repr(leaf)).encode())
    return found.hexdigest()[:16]


def _bytes(x: torch.Tensor) -> bytes:
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        return repr(x).encode()
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(x.view(torch.uint8).numpy()) if x.numel() and x.ndim else str(x).encode()


# -- names, pickles, scripts, graphs ---------------------------------------------------------------

SPACES = (
    torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.special, torch.fft, torch.random,
    torch.autograd, torch.Generator, torch._C._VariableFunctions, torch._C.TensorBase, torch.func,
    torch.autograd.Function, torch.nested, torch.sparse, dist, torch.utils.checkpoint,
)  # fmt: skip


def _callables() -> Iterator[tuple[str, Any]]:
    for space in SPACES:
        for name, found in inspect.getmembers(space):
            if callable(found) and not name.startswith("__") and name != "handle_torch_function":
                yield f"{getattr(space, '__name__', type(space).__name__)}.{name}", found


# As torch's tracers and users' tables have them: made before the library was there.
KEYS = {found: name for name, found in _callables() if found.__hash__ is not None}
# Private functions whose form has no vectorcall to be redirected by, one of which is known as
# Function.apply since torch 2.15; and a method in Python of the
# contexts of functions, which tables and tracers know by the class of the context.
REHASHED = {
    *(["Function.apply"] if inspect.isbuiltin(torch.autograd.Function.apply) else []),
    "Function.save_for_backward",
    "torch.distributed._broadcast_coalesced",
    "torch.distributed._verify_params_across_processes",
}


@program
def what_names_are() -> Lines:
    for name, found in _callables():
        yield name, name in REHASHED or KEYS.get(found)
        about = [type(found), getattr(found, "__doc__", ""), getattr(found, "__module__", "")]
        yield name, digest([*about, getattr(found, "__qualname__", ""), repr(found)])


@program
def what_pickles_hold() -> Lines:
    for name, found in _callables():
        try:
            yield name, digest(pickle.dumps(found))
        except Exception as error:  # noqa: BLE001
            yield name, type(error).__name__
    yield pickle.loads(pickle.dumps(torch.as_tensor)) is torch.as_tensor, as_tensor([1, 2]).tolist()


def scripted(x: torch.Tensor, n: int) -> torch.Tensor:
    y = torch.tensor([1.0, 2.0]) + torch.as_tensor([n, n])
    return torch.nn.functional.relu(x + y * float(x.sum())).clone()


@program
def scripts_and_graphs() -> Lines:
    x = torch.arange(2.0)
    script = torch.jit.script(scripted)
    yield str(script.graph), script(x, 2).tolist()
    for module in (torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)):
        torch.nn.init.ones_(next(module.parameters()))
        yield digest(torch.jit.script(module).code)
    file = io.BytesIO()
    torch.jit.save(script, file)
    file.seek(0)
    yield torch.jit.load(file)(x, 2).tolist()
    traced = torch.jit.trace(lambda t: torch.tensor([1.0]) + t.sin() * t.new_tensor([2.0]), (x,))
    yield str(traced.graph), traced(x).tolist()
    yield make_fx(lambda t: torch.tensor([1.0]) + t.sin())(x).code
    yield torch.export.export(torch.nn.Linear(2, 2), (x,)).graph_module.code
    yield torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())).code
    yield torch.compile(lambda t: t.sin() + torch.tensor(1.0), backend="eager")(x).tolist()


# -- values and what watches them ------------------------------------------------------------------


@program
def numbers_and_lists() -> Lines:
    nested: list[Any] = [1.0]
    for _ in range(3):
        nested = [nested, nested]
    yield [digest(make(nested)) for make in (tensor, as_tensor, torch.asarray, torch.Tensor)]
    yield digest(torch.full((2,), torch.tensor(3.0))), digest(torch.ones(2).new_tensor([1]))
    itself: list[Any] = []
    itself.append(itself)
    for make in (torch.tensor, torch.as_tensor, torch.ones(1).new_tensor):
        try:
            make(itself)
        except Exception as error:  # noqa: BLE001
            yield f"{type(error).__name__}: {error}"
    yield digest([torch.stack(list(torch.ones(2, 3))), torch.cat([torch.ones(2), torch.zeros(1)])])


@program
def random_states() -> Lines:
    manual_seed(3)
    generator = torch.Generator().manual_seed(5)
    states = [torch.get_rng_state(), generator.get_state(), generator.clone_state().get_state()]
    yield digest([*states, torch.rand(3), torch.randn(3, generator=generator)])
    with torch.random.fork_rng():
        yield digest([torch.rand(5), torch.get_rng_state()])
    torch.set_rng_state(states[0].clone())
    yield digest(torch.rand(5)), torch.initial_seed(), generator.initial_seed()
    yield torch.default_generator is torch.random.default_generator


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        ctx.mark_dirty(y)
        return x * 2, y.mul_(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, h: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * 2 * x, h * x


class Seen(TorchDispatchMode, TorchFunctionMode):
    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def _step() -> list[Any]:
    manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    x = torch.rand(5, 3, requires_grad=True)
    threads: list[bool] = []
    x.register_hook(lambda g: threads.append(torch.autograd.is_multithreading_enabled()))
    seen: list[Any] = []
    net[0].register_full_backward_hook(lambda m, gi, go: seen.extend([*gi, *go]))
    y = sum(checkpoint(net, x, use_reentrant=reentrant).sum() for reentrant in (True, False))
    y = y + sum(z.sum() for z in Double.apply(x, torch.ones(5, 3)))
    y.backward()
    (g,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    parameters = list(net.parameters())
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.optim.Adam(parameters, lr=torch.tensor(0.1)).step()
    return [y, x.grad, g, parameters, seen, threads, type(y.grad_fn).__name__]


@program
def a_step_and_what_watches_it() -> Lines:
    yield digest(_step())
    with Seen() as ops:
        yield digest(_step())
    with SeenFunctions() as functions:
        yield digest(_step())
    yield ops.seen
    yield functions.seen
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        _step()
    yield [event.name for event in profile.function_events or ()]
    with FlopCounterMode(display=False) as flops:
        torch.nn.Linear(3, 4)(torch.ones(2, 3)).sum().backward()
    yield flops.get_total_flops()
    with torch.autograd.set_multithreading_enabled(False):
        yield digest(_step())
    for transformed in (torch.vmap(torch.sin), torch.func.jacrev(torch.sin)):
        yield digest(transformed(torch.ones(2, 3)))
    yield digest(torch.func.hessian(lambda t: t.sin().sum())(torch.ones(3)))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    yield digest([t * 2 for t in nested.unbind()])


@program
def properties() -> Lines:
    x, y = torch.zeros(2, requires_grad=True), torch.ones(2)
    x.data, x.grad = y, y.clone()
    z = torch.zeros(2, dtype=torch.complex64)
    z.real, z.imag = y, y * 2
    yield digest([x, x.grad, z]), x.data_ptr() == y.data_ptr()
    x.grad = None
    for name, value in (("data", torch.ones(2, dtype=torch.int64)), ("grad", torch.ones(3))):
        try:
            setattr(x, name, value)
        except Exception as error:  # noqa: BLE001
            yield f"{type(error).__name__}: {error}"
    try:
        del x.data
    except Exception as error:  # noqa: BLE001
        yield f"{type(error).__name__}: {error}"
    yield x.grad


@program
def a_process_group() -> Lines:
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/store"  # the group removes the file when it goes
        dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
        x, out = torch.arange(3.0), torch.empty(3)
        dist.all_reduce(x)
        dist.all_gather_into_tensor(out, x)
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        torch.nn.init.ones_(net.module.weight)
        net(x).backward()
        yield digest([x, out, net.module.weight.grad])
        # torch's reducer must not be the last that knows the group: it would wait for the group's
        # threads while it holds the interpreter, for which these wait where they release a tensor.
        del net
        dist.destroy_process_group()


# -- torch's own tests -----------------------------------------------------------------------------


@program
def modules() -> Lines:
    for info in module_db:
        for training in (False, True):
            manual_seed(0)
            samples = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
            )
            for sample in samples[:2]:
                yield info.name, _tried(lambda: _module(info, sample, training))  # noqa: B023


def _module(info: Any, sample: Any, training: bool) -> Any:
    manual_seed(0)
    made = sample.constructor_input
    module = info.module_cls(*made.args, **made.kwargs).train(training)
    given = sample.forward_input
    out = module(*given.args, **given.kwargs)
    _backward(out)
    return out, [p.grad for p in module.parameters()], module.state_dict()


def _backward(out: Any) -> None:
    outs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    if outs:
        torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])


@program
def optimizers() -> Lines:
    for info in optim_db:
        for sample in info.optim_inputs_func("cpu"):
            yield info.name, sample.desc, _tried(lambda: _optimized(info, sample))  # noqa: B023


def _optimized(info: Any, sample: Any) -> Any:
    manual_seed(0)
    shapes = ((3, 2), (2, 2)) if "Muon" in info.name else ((3, 2), (4,))
    params = [torch.rand(shape, requires_grad=True) for shape in shapes]
    optimizer = info.optim_cls(params, **sample.kwargs)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()  # type: ignore[union-attr]
        return loss  # type: ignore[return-value]

    return [optimizer.step(closure) for _ in range(2)], params


@program
def ops() -> Lines:
    for info in op_db[::5]:
        if "empty" in info.name or not info.supports_dtype(torch.float32, "cpu"):
            continue
        manual_seed(0)
        samples = info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)
        for sample, _ in zip(samples, range(2), strict=False):
            yield info.name, _tried(lambda: _op(info, sample))  # noqa: B023


def _op(info: Any, sample: Any) -> Any:
    manual_seed(0)
    out = info(sample.input, *sample.args, **sample.kwargs)
    _backward(out)
    given = tree_leaves((sample.input, sample.args, sample.kwargs))
    return out, [x.grad for x in given if isinstance(x, torch.Tensor) and x.is_leaf]


@program
def compiled_steps() -> Lines:
    for info in optim_db if ALL else optim_db[::8]:  # each takes Dynamo half a second
        yield info.name, _tried(lambda: _compiled(info.optim_cls))  # noqa: B023


def _compiled(optimizer_class: Any) -> Any:
    """A training step by Dynamo: how often it breaks the graph, and what the step gives."""
    manual_seed(0)
    net, x = torch.nn.Linear(2, 2, bias=False), torch.rand(3, 2)
    optimizer = optimizer_class(net.parameters())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    graphs: list[str] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=keep)
    return [compiled() for _ in range(2)], net.state_dict(), len(graphs)


def _tried(run: Callable[[], Any]) -> str:
    try:
        return digest(run())
    except Exception as error:  # noqa: BLE001
        return re.sub("0x[0-9a-f]+", "", f"{type(error).__name__}: {error}").splitlines()[0]


# -- the library -----------------------------------------------------------------------------------


def _objects() -> dict[str, int]:
    """Which object each name of torch's modules and classes is."""
    found = {}
    for path, module in list(sys.modules.items()):
        if module is None or path.partition(".")[0] not in ("torch", "warnings", "random", "numpy"):
            continue
        for name, value in list(vars(module).items()):
            found[f"{path}.{name}"] = id(value)
            if isinstance(value, type) and value.__module__ == path:
                members = vars(value).items()
                found |= {f"{path}.{name}.{n}": id(v) for n, v in members}
    return found


# torch.load is told our classes.
REGISTERED = {"torch._weights_only_unpickler._marked_safe_globals_set"}
# Once a global tensor exists; why is said where it is done, in consistent/torch_patches/.
CHANGED = REGISTERED | {
    "torch.functional.handle_torch_function",
    "torch.nn.functional.handle_torch_function",
    "torch._tensor.handle_torch_function",
    "torch._tensor_str._str_intern",
    "torch.autograd.function.BackwardCFunction.apply",
    "torch.autograd.function.BackwardCFunction.apply_boxed",
    "torch.autograd.function.BackwardCFunction.apply_jvp",
    "torch.autograd.function.FunctionCtx.save_for_backward",
    "torch.autograd.function._ContextMethodMixin.save_for_backward",
    "torch.autograd.graph.save_on_cpu.__init__",
    "torch.distributed._state_dict_utils._iterate_state_dict",
    "torch.nn.modules.module.Module.to",
    "torch.nn.modules.rnn.RNNBase.flatten_parameters",
    "torch.optim.lbfgs.LBFGS._gather_flat_grad",
    "torch.optim.optimizer.Optimizer._process_value_according_to_param_policy",
    "torch.utils.checkpoint._CheckpointFrame.get_inputs",
    "torch.utils.checkpoint._CheckpointFrame.save_inputs",
    "torch.utils.checkpoint._NoopSaveInputs.setup_context",  # had their place in older releases
    "torch.utils.flop_counter.get_shape",
    # Functions of torch.testing, which this imports; without it they are builtins.
    "torch.ScriptMethod.__call__",
    "torch.jit.ScriptFunction.__call__",
}
_COUNTED = re.compile(
    r"__abstractmethods__|_abc_|__weakref__|__static_attributes__|_cache$|_count$|\.next_id$"
)


def enter(mode: str) -> list[str]:
    """Import the library, or use it too; the names of torch that are other objects afterwards."""
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.step()  # torch itself changes a class of optimizers at its first one
    before = _objects()
    if mode != "none":
        import consistent

        if mode == "used":
            x = consistent.ones(3, placement=consistent.Placement("cpu", [0]), sbp=consistent.B)
            assert (x + 1).sum().item() == 6
            consistent.parallelize(net, x.placement, "zero1")
            net(x).sum().backward()
            optimizer.step()
    after = _objects()
    changed = {name for name, at in before.items() if name in after and after[name] != at}
    return sorted(name for name in changed if not _COUNTED.search(name))


def _is_there(name: str) -> bool:
    """Whether this torch has it."""
    try:
        return pkgutil.resolve_name(name) is not None
    except AttributeError:
        return False


def main(folder: str, modes: list[str]) -> int:
    """Run each mode in a fork of its own; 1 if one of them fails."""
    statuses = []
    for mode in modes:
        forked = os.fork()
        if not forked:
            _be(mode, folder)
        statuses.append(os.waitpid(forked, 0)[1])
    return int(any(statuses))


def _be(mode: str, folder: str) -> NoReturn:
    status = 1
    try:
        with open(os.path.join(folder, mode), "w") as said, contextlib.redirect_stdout(said):
            run_all(mode)
        status = 0
    except BaseException:  # noqa: BLE001 - the fork must end here
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def run_all(mode: str) -> None:
    changed = enter(mode)
    expected = {"none": set(), "imported": REGISTERED, "used": CHANGED}[mode]
    assert set(changed) == set(filter(_is_there, expected)), f"changed: {changed}"
    warnings.simplefilter("always")
    shown: list[str] = []
    warnings.showwarning = lambda m, c, *_: shown.append(f"{c.__name__}: {m}")  # type: ignore[assignment]
    for run in PROGRAMS:
        torch.manual_seed(0)
        for line in run():
            print(run.__name__, line)
        print(run.__name__, "warnings", shown)
        shown.clear()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
