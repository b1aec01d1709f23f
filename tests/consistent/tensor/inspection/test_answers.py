"""What a rank may ask of a tensor alone, and what it gets: every attribute of torch.Tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import consistent
from consistent import B, GlobalTensor, P, Placement, S
from consistent.dispatch.planning.functions.questions import computes_tensors
from consistent.dispatch.planning.functions.torch_functions import resolve
from consistent.dispatch.plans.plan import handlers, list_ops
from consistent.rules import table
from consistent.tensor.inspection import answers
from consistent.tensor.inspection.printing import holds_whole_value
from mirrored.transports.default import current
from tests.alone import Communicated, alone, grids, laid
from tests.each_of import each_of
from tests.generated import DOCS, generator

pytestmark = pytest.mark.filterwarnings("ignore")
MAKE = generator("make_inspection")
NAMES = MAKE.classified()


def test_the_page_is_what_the_generator_writes() -> None:
    written = (DOCS / "inspection.md").read_text()
    if f"(torch {MAKE.version()})" not in written:
        pytest.skip(f"docs/inspection.md is of another torch than {MAKE.version()}")
    assert written == MAKE.page(), "out of date: run python docs/make_inspection.py"


def test_somebody_has_said_what_each_attribute_of_a_tensor_answers() -> None:
    assert NAMES[""] == [], "docs/make_inspection.py, or inspection/answers.py"


def test_somebody_has_said_what_each_function_of_torch_answers_that_computes_no_tensor() -> None:
    asked, there = set(), set()
    for space in (torch._C._VariableFunctions, torch._C._nn, torch._C._linalg):
        for name in dir(space):
            function = getattr(space, name)
            there.add(name)
            if name.startswith("__") or not callable(function):
                continue
            known = resolve(function)
            full = known.name + "_" * known.inplace
            if table.find_row(known.name) is None and not full.startswith(tuple(list_ops)):
                if not computes_tensors(full) and full not in handlers:
                    asked.add(name)
    assert asked == (NO_TENSOR_ASKED | {"allclose", "equal", "is_nonzero"}) & there


# They take no tensor, or read one's values where torch quantizes it, or raise for all tensors.
NO_TENSOR_ASKED = set(
    """_choose_qparams_per_tensor _cslt_sparse_mm_search _cufft_get_plan_cache_max_size
    _cufft_get_plan_cache_size _from_blob _nested_get_ragged_idx
    _nnpack_available _parse_to _use_cudnn_ctc_loss
    _use_cudnn_rnn_flatten_weight _use_miopen_ctc_loss asarray can_cast from_numpy frombuffer
    is_vulkan_available promote_types""".split()
)


# -- one rank asks ---------------------------------------------------------------------------------


def _wholes() -> dict[str, torch.Tensor]:
    matrix = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    columns_first = matrix.t().contiguous().t().detach()
    number = torch.tensor(2.5, dtype=torch.float64)
    return {"matrix": matrix, "columns first": columns_first, "number": number}


@functools.cache
def _made(entries: tuple) -> list[tuple[int, int, torch.Tensor, Any]]:
    """(rank, size of the world, the logical tensor, this rank's global one) of every layout. To ask
    a tensor changes nothing of it, so all tests have the same."""
    found = []
    for name, full in _wholes().items():
        fitting = tuple(e for e in entries if not (e.is_split and name == "number"))
        for rank, size, placement, sbp in grids(fitting):
            with alone(rank, size):
                found.append((rank, size, full, laid(full, placement, sbp)))
    return found


def _tensors(entries: tuple) -> Iterator[tuple[torch.Tensor, Any]]:
    """(the logical tensor, this rank's global one), each while its rank is alone."""
    for rank, size, full, x in _made(entries):
        with alone(rank, size):
            yield full, x


LAYOUTS = (S(0), S(1), B, P, P(max))
# Arguments of those that need some; the rest are called without any.
CALLS: dict[str, Callable[[Any], Any]] = {
    "__array_wrap__": lambda x: x.__array_wrap__(np.ones(3)),
    "__contains__": lambda x: 3.0 in x,
    "__deepcopy__": lambda x: tuple(x.__deepcopy__({}).shape),
    "__delattr__": lambda x: (setattr(x, "mine", 1), x.__delattr__("mine"))[1],
    "__dir__": lambda x: sorted(set(x.__dir__()) & set(dir(torch.Tensor))),
    "__dlpack__": lambda x: x.__dlpack__(),
    "__format__": lambda x: (f"{x!s}", f"{x:.3f}" if x.ndim == 0 else "", f"{x}"),
    "__getattribute__": lambda x: x.__getattribute__("ndim"),
    "__reduce_ex__": lambda x: x.__reduce_ex__(4),
    "__setattr__": lambda x: x.__setattr__("mine", 3),
    "__setstate__": lambda x: x.__setstate__((x, 0, (2,), (1,))),
    "_dtensor__new__": lambda x: x._dtensor__new__(GlobalTensor, x, None),
    "_make_subclass": lambda x: x._make_subclass(torch.Tensor, x),
    "_make_wrapper_subclass": lambda x: x._make_wrapper_subclass(torch.Tensor, (2,)),
    "_reduce_ex_internal": lambda x: x._reduce_ex_internal(4),
    "_update_names": lambda x: x._update_names(None, False),  # before torch 2.13, as align_as
    "_view_func": lambda x: x._view_func(x),
    "_view_func_unsafe": lambda x: x._view_func_unsafe(x),
    "align_as": lambda x: x.align_as(x),
    "allclose": lambda x: x.allclose(x + 1),
    "as_strided_": lambda x: x.as_strided_((2,), (1,)),
    "as_subclass": lambda x: x.as_subclass(torch.Tensor),
    "equal": lambda x: x.equal(x + 1),
    "is_nonzero": lambda x: x.sum().is_nonzero(),
    "is_same_size": lambda x: (x.is_same_size(x), torch.is_same_size(x, torch.ones(2))),
    "is_set_to": lambda x: (
        x.is_set_to(x),
        x.is_set_to(x.clone()),
        x.is_set_to(x.data),
        torch.ones(2).is_set_to(x),
    ),
    "register_hook": lambda x: x.clone().requires_grad_().register_hook(print) and None,
    "register_post_accumulate_grad_hook": lambda x: (
        x.clone().requires_grad_().register_post_accumulate_grad_hook(print) and None
    ),
    "requires_grad_": lambda x: x.clone().requires_grad_().requires_grad,
    "resize": lambda x: x.resize(2, 2),
    "resize_as": lambda x: x.resize_as(torch.ones(3)),
    "_rev_view_func_unsafe": lambda x: x._rev_view_func_unsafe(x),
    "retain_grad": lambda x: x.clone().requires_grad_().retain_grad(),
    "share_memory_": lambda x: tuple(x.share_memory_().shape),
    "type": lambda x: x.type(),
}
# Calls that take the tensor's own say on what it is and where it lies: not those of another one.
OWN = {
    *("_cdata", "_use_count", "_fix_weakref", "__dict__", "__class__", "__weakref__", "__hash__"),
    *("__firstlineno__", "__static_attributes__"),  # of a class, since Python 3.13
}
OWN |= {"__sizeof__", "__str__", "__repr__", "__format__", "__reduce__", "__reduce_ex__", "__new__"}
OWN |= {"__init_subclass__", "__subclasshook__", "__getstate__", "__doc__", "__module__"}
OWN |= {"__torch_function__", "__torch_dispatch__", "__annotations__", "__delitem__", "__init__"}
OWN |= {"_clear_non_serializable_cached_data", "_python_dispatch", "record_stream", "__setattr__"}
OWN |= {"_backward_hooks", "_post_accumulate_grad_hooks", "__getattribute__"}
PROPERTY = set(
    """_backward_hooks _base _cdata _grad _grad_fn _has_symbolic_sizes_strides
    _post_accumulate_grad_hooks _python_dispatch _version""".split()
)


def _ask(x: Any, name: str) -> Any:
    if name in CALLS:
        return CALLS[name](x)
    found = getattr(x, name)
    is_method = callable(found) and not isinstance(found, type | torch.Tensor | torch.dtype)
    return found() if is_method else found


def _answer(x: Any, name: str) -> Any:
    """What is answered, or that it raises."""
    try:
        return _ask(x, name)
    except Exception as error:  # noqa: BLE001 - which one is torch's business
        return type(Exception), str(error)


def _ask_unbound(x: Any, name: str) -> Any:
    """``torch.Tensor.name(x)``, or the getter of a property."""
    found = getattr(torch.Tensor, name)
    return found(x) if callable(found) else found.__get__(x)


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, tuple) and value[:1] == (type(Exception),):
        return "raises"
    return value


# P(max) and P(min) have none, and say so.
ASKS_FOR_GRADIENTS = set(
    "register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad".split()
)
ANSWERED = [
    name
    for kind in ("from the spec", "logical", "this rank's", "autograd", "a view", "Python's")
    for name in NAMES[kind]
]


@each_of("name", ANSWERED)
def test_an_answer_is_the_logical_tensors_and_nothing_is_sent(name: str) -> None:
    for full, x in _tensors(LAYOUTS):
        answer = _answer(x, name)
        forward_only = any(e.is_extreme for e in x.sbp) and name in ASKS_FOR_GRADIENTS
        if name not in OWN and not forward_only:
            wanted = _answer(full, name)
            assert _comparable(answer) == _comparable(wanted), (x._spec, current().rank)


@each_of("name", NAMES["raises"])
def test_what_would_take_the_shard_for_the_whole_raises_and_says_what_to_call(name: str) -> None:
    for _, x in _tensors(LAYOUTS):
        asked = PYTHON_OVER_STORAGE.get(name, name)
        with pytest.raises(RuntimeError, match=f"^{asked}: x is .*; .*\\. Use .*") as error:
            _ask(x, name)
        assert str(x._spec) in str(error.value) or name == "_make_wrapper_subclass"


# Functions of torch that ask no hook, and that end at another question.
PYTHON_OVER_STORAGE = dict.fromkeys(("_reduce_ex_internal", "_typed_storage"), "untyped_storage")


@each_of("name", NAMES["reads the value"])
def test_reading_a_value_is_what_communicates(name: str) -> None:
    for _, x in _tensors((S(0), P, B)):
        world = holds_whole_value(x._spec) and x.placement.size == current().size
        try:
            _answer(x, name)
        except Communicated:
            assert not world
        else:
            is_number = name in ("item", *_NUMBERS)
            assert world or (is_number and x.numel() != 1) or name == "__index__"


_NUMBERS = "__bool__ __complex__ __float__ __index__ __int__ __long__ __nonzero__".split()


def test_attributes_that_a_global_tensor_has_not_are_absent() -> None:
    for _, x in _tensors(LAYOUTS):
        assert not any(hasattr(x, name) or hasattr(type(x), name) for name in NAMES["hidden"][1:])
        assert not hasattr(x, "__cuda_array_interface__")


def test_a_method_that_nobody_has_looked_at_raises() -> None:
    unknown = handlers.pop("get_device")
    try:
        for _, x in _tensors((S(0), B)):
            with pytest.raises(RuntimeError, match="^get_device: x is .* Use x.to_local"):
                x.get_device()
            with pytest.raises(RuntimeError, match="^get_device: x is .* Use x.to_local"):
                torch.get_device(x)
    finally:
        handlers["get_device"] = unknown


@pytest.mark.parametrize("kind", ["text", "a copy", "hidden"])
def test_text_and_copies_are_made_without_the_others(kind: str) -> None:
    for name in NAMES[kind]:
        for _, x in _tensors(LAYOUTS):
            _answer(x, name)


# They are Python's, or asked of the class itself.
OF_THE_CLASS = {"__class__", "__dict__", "__init_subclass__", "__subclasshook__", "__new__"}
OF_THE_CLASS |= {"__delattr__", "__delitem__", "__setattr__", "__getattribute__", "__init__"}
UNBOUND = [
    name
    for name in (*ANSWERED, *NAMES["text"], *NAMES["a copy"])
    if hasattr(torch.Tensor, name) and name not in OF_THE_CLASS
]


@each_of("name", UNBOUND)
def test_the_function_of_the_class_answers_without_the_others_as_the_method_does(name: str) -> None:
    for _, x in _tensors((S(0), B)):
        try:
            answer = _ask_unbound(x, name)
        except Exception:  # noqa: BLE001 - which one is torch's business
            continue
        if name not in CALLS and name not in OWN - {"__str__", "__repr__"}:
            assert _comparable(answer) == _comparable(_ask(x, name)), x._spec


def test_the_text_of_torchs_own_printing_is_the_tensors() -> None:
    for _, x in _tensors(LAYOUTS):
        assert torch._tensor_str._str(x) == str(x) == repr(x)
        assert torch.Tensor.__repr__(x, tensor_contents=None) == repr(x)
        assert torch.Tensor.__format__(x, "") == f"{x}"


def _refused_to_dense() -> list[str]:
    """Methods that torch refuses to whatever dense tensor."""
    dense = [torch.ones(3, 4), torch.ones(4, 4).long(), torch.ones(()), torch.ones(2, 3, 4, 4)]
    found = []
    for name in dir(torch.Tensor):
        errors = [_answer(x, name) for x in dense if not name.startswith("__")]
        texts = [text for answer in errors for text in _error(answer)]
        if len(texts) == len(dense):
            found += [name] if all(map(_is_of_layout, texts)) else []
    return found


def _error(answer: Any) -> tuple[str, ...]:
    is_error = isinstance(answer, tuple) and answer[:1] == (type(Exception),)
    return answer[1:] if is_error else ()


def _is_of_layout(text: str) -> bool:
    return "but got Strided" in text or text.startswith("Could not run 'aten::")


@each_of("name", _refused_to_dense())
def test_what_torch_refuses_to_a_dense_tensor_raises_without_the_others(name: str) -> None:
    for _, x in _tensors(LAYOUTS):
        for ask in (_ask, _ask_unbound):
            with pytest.raises((RuntimeError, NotImplementedError)):
                ask(x, name)


@each_of("name", sorted(answers.PARTS))
def test_a_part_of_a_sparse_tensor_that_is_dense_says_so(name: str) -> None:
    for _, x in _tensors((S(0), P, B)):
        with pytest.raises(RuntimeError, match=f"^{name}: x is .*; it is dense, .*"):
            getattr(torch, name, getattr(torch.Tensor, name, None))(x)


def test_a_module_changes_its_dtype_and_goes_through_its_parameters_without_the_others() -> None:
    for rank in range(3):
        with alone(rank, 3):
            for sbp in (S(0), B):
                module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))
                consistent.parallelize(module, Placement("cpu", [0, 1]), {"*": sbp}, sync=False)
                module.double().to("cpu").share_memory().requires_grad_(False).eval()
                assert {p.dtype for p in module.parameters()} == {torch.float64}
                assert all(p.sbp == (sbp,) for p in module.parameters())
                torch.optim.Adam(module.parameters(), capturable=False)
                assert sum(p.nbytes for p in module.parameters()) == 8 * (20 + 3 * 5)
                assert torch.nn.utils.parameters_to_vector([module[0].bias]).shape == (5,)


def test_descriptors_of_torch_answer_as_the_attribute_does() -> None:
    for _, x in _tensors((S(0), B)):
        for name in ("shape", "dtype", "device", "ndim", "is_leaf", "requires_grad", "is_xpu"):
            assert getattr(torch.Tensor, name).__get__(x) == getattr(x, name)
