"""Whatever an op of aten writes to, lies it split, partial or broadcast, holds what torch writes.

Every schema of aten that writes to a tensor is called on plain tensors and on global ones, with
arguments made from the schema: written ones are laid S(0) and P, of a second kind of
arguments B, the others B.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import consistent
from consistent import B, P, S
from consistent.dispatch.planning.writes import written_arguments
from consistent.dispatch.plans.shards import plain
from consistent.spec import Placement, Sbp, TensorSpec, fits_dtype
from tests.ranks import ALL, on_ranks, simulate
from tests.reference import scatter
from tests.torch_release import IS_2_13

N = 4  # matrices are N x N, and so is everything else that may be

# What torch itself leaves undefined, or ends the process with, for arguments that are made up.
NOT_CALLED = frozenset(
    """_native_batch_norm_legit _pdist_backward _weight_norm_interface
    _weight_norm_interface_backward addbmm bernoulli_ empty empty_like empty_permuted
    empty_strided geometric bernoulli new_empty new_empty_strided rand randint randn randperm
    _convert_indices_from_csr_to_coo _sobol_engine_initialize_state_""".split()
)


_OF_LISTS = frozenset("append clear Delete extend insert pop popitem remove reverse update".split())


def schemas() -> list[tuple[str, str]]:
    """(op, overload) of every schema that writes to a tensor."""
    found = []
    # Not dir(torch.ops.aten), which has those only that somebody has asked for.
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space != "aten" or name in NOT_CALLED or not any(map(_written, schema.arguments)):
            continue
        overload = schema.overload_name or "default"
        if "Dict" in str(schema) or name in _OF_LISTS:  # of Python's containers
            continue
        if hasattr(getattr(torch.ops.aten, name), overload):
            found.append((name, overload))
    return sorted(found)


def _written(argument: Any) -> bool:
    return (argument.alias_info is not None and argument.alias_info.is_write) and "Tensor" in str(
        argument.type
    )


# -- arguments made from a schema ------------------------------------------------------------------


def real(seed: int) -> torch.Tensor:
    made = torch.rand(N, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made + torch.eye(N, dtype=torch.float64) * 2


def whole(seed: int) -> torch.Tensor:
    return torch.randint(1, N, (N, N), generator=torch.Generator().manual_seed(seed))


def vector(seed: int) -> torch.Tensor:
    return real(seed)[0].clone()


def truth(seed: int) -> torch.Tensor:
    return whole(seed) > 1


def image(seed: int) -> torch.Tensor:
    return real(seed).repeat(2, N, 1, 1).contiguous()


def scalar(seed: int) -> torch.Tensor:
    return real(seed)[0, 0].clone()


def batch(seed: int) -> torch.Tensor:
    return torch.stack([real(seed + k) for k in range(N)])


KINDS: list[Callable[[int], torch.Tensor]] = [real, whole, truth, vector, batch, image]

NAMED: dict[str, Any] = {
    "index": lambda seed: whole(seed)[0].clone(),
    "indices": lambda seed: whole(seed),
    "mask": truth,
    "condition": truth,
    "dim": 0, "dim0": 0, "dim1": 1, "axis0": 0, "axis1": 1, "axis": 0, "p": 2, "n": 2, "k": 1,
    "dtype": None, "generator": None, "reduce": "sum", "size": [N, N], "memory_format": None,
    "kernel_size": [2, 2], "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1],
    "output_size": [2, 2], "groups": 1, "lambd": 0.5, "repeats": [1, 2], "source": real,
    "found_inf": lambda seed: torch.zeros((), dtype=torch.float32),
    "inv_scale": lambda seed: torch.full((), 0.5, dtype=torch.float32),
    "growth_tracker": lambda seed: torch.zeros((), dtype=torch.int32),
    "running_mean": vector, "running_var": vector, "weight": vector, "bias": vector,
    "state_steps": lambda seed: [torch.ones(()) for _ in range(2)],
    "mat2": batch, "vec": vector, "vec2": vector, "min": 0.5, "max": 2.5, "value": scalar,
    "mat1": real, "batch1": batch, "batch2": batch, "reduction": 1, "self_": None,
    "grads": lambda seed: [real(7), real(8)], "exp_avgs": lambda seed: [real(9), real(10)],
    "exp_avg_sqs": lambda seed: [real(11), real(12)],
    "lr": 0.1, "is_first_step": False, "nesterov": False, "amsgrad": True,
    "max_exp_avg_sqs": lambda seed: [real(13), real(14)],
}  # fmt: skip

# -- one call, plain and global --------------------------------------------------------------------


def arguments(schema: Any, kind: Callable[[int], Any], named: bool) -> tuple[list, dict]:
    args, kwargs = [], {}
    for position, argument in enumerate(schema.arguments):
        if argument.is_out:
            continue
        value = _value(argument, position, kind, named)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _value(argument: Any, position: int, kind: Callable[[int], Any], named: bool) -> Any:
    text = str(argument.type)
    if named and argument.name in NAMED and NAMED[argument.name] is not None:
        given = NAMED[argument.name]
        if ("Tensor" in text) != callable(given):
            given = kind if "Tensor" in text else argument.default_value
        if "Optional[number]" in text and argument.name in ("min", "max"):
            given = NAMED[argument.name]
        return given(position) if callable(given) else given
    if argument.has_default_value() and "Tensor" not in text:
        return argument.default_value
    if "List[Tensor]" in text or "List[Optional[Tensor]]" in text:
        return [kind(position), kind(position + 10)]
    if "Tensor" in text:
        return kind(position)
    number = 1.5 if kind(0).is_floating_point() else 2
    numbers = {"number": number, "float": 0.5, "int": 1, "bool": False, "str": "none"}
    if text in numbers:
        return numbers[text]
    if text.startswith("List["):
        return [1, 1] if "int" in text else [0.5, 0.5]
    return None


def drawn(name: str, overload: str) -> Iterator[tuple[list, dict, list[torch.Tensor]]]:
    """Arguments that torch takes, and tensors for its ``out``; at most two ways."""
    function = getattr(getattr(torch.ops.aten, name), overload)
    schema, found = function._schema, 0
    outs = [a for a in schema.arguments if a.is_out]
    for kind in KINDS:
        for named in (True, False):
            args, kwargs = arguments(schema, kind, named)
            try:
                given = tree_map(_copy, (args, kwargs))
                made = _into(function, *given, outs)
            except Exception:  # noqa: BLE001  (torch says no in many ways: the next kind)
                continue
            if not all(isinstance(x, torch.Tensor) and _is_dense(x) for x in made):
                continue
            if not _is_settled(function, args, kwargs, made):
                continue
            yield args, kwargs, made
            found += 1
            if found == 2:
                return


def _is_settled(function: Any, args: list, kwargs: dict, outs: list) -> bool:
    """Whether torch gives the same twice, without changing shapes: nothing is drawn at random, read
    from beyond the arguments or resized."""
    names = [a.name for a in function._schema.arguments if a.is_out]
    seen = []
    for _ in range(2):
        mine, named, into = tree_map(_copy, (args, kwargs, outs))
        function(*mine, **named, **dict(zip(names, into, strict=True)))
        seen.append([x for x in tree_leaves((mine, named, into)) if isinstance(x, torch.Tensor)])
    before = [x for x in tree_leaves((args, kwargs, outs)) if isinstance(x, torch.Tensor)]
    return all(
        a.shape == b.shape == c.shape and c.numel() and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b, c in zip(*seen, before, strict=True)
    )


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _is_dense(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and not x.is_quantized


def _into(function: Any, args: list, kwargs: dict, outs: list) -> list[torch.Tensor]:
    """The tensors that torch gives for ``out``, made by a first call."""
    if not outs:
        function(*args, **kwargs)
        return []
    single = [a for a in outs if "List" not in str(a.type)]
    if len(single) != len(outs):
        raise TypeError("lists of outputs are for torch's own use")
    empty = {a.name: torch.empty(0, dtype=torch.float64) for a in outs}
    for dtype in (torch.float64, torch.int64, torch.bool, torch.int32, torch.complex128):
        empty = {a.name: torch.empty(0, dtype=dtype) for a in outs}
        try:
            function(*tree_map(_copy, args), **tree_map(_copy, kwargs), **empty)
            break
        except RuntimeError as error:
            if "dtype" not in str(error) and "type" not in str(error):
                raise
    else:
        raise TypeError("no dtype fits")
    return list(empty.values())


def lay(x: Any, sbp: Sbp, placement: Placement, rank: int) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    if (sbp.is_split and not x.ndim) or not fits_dtype(sbp, x.dtype):
        sbp = B
    spec = TensorSpec.of(placement, sbp, x.shape, x.dtype)
    return consistent.from_local(scatter(x, spec)[rank], placement, sbp, shape=x.shape)


LAYOUTS = (S(0), P, B)


def differs(rank: int, cases: list[tuple[str, str, Any, tuple[Sbp, ...]]]) -> list[str]:
    warnings.simplefilter("ignore")
    placement, wrong = Placement("cpu", [0, 1]), []
    for name, overload, given, sbps in cases:
        for sbp in sbps:
            fault = _compared(name, overload, given, sbp, placement, rank)
            if fault:
                wrong.append(f"{name}.{overload} {sbp}: {fault}")
    return wrong


def _compared(
    name: str, overload: str, given: tuple, sbp: Sbp, placement: Placement, rank: int
) -> str:
    function = getattr(getattr(torch.ops.aten, name), overload)
    schema = function._schema
    args, kwargs, outs = tree_map(_copy, given)
    kwargs.update(zip((a.name for a in schema.arguments if a.is_out), outs, strict=True))
    written = {a.name: _written(a) for a in schema.arguments}
    names = [a.name for a in schema.arguments if not a.kwarg_only]
    mine = [
        tree_map(lambda x, n=n: lay(x, sbp if written[n] else B, placement, rank), value)
        for n, value in zip(names, args, strict=False)
    ]
    named = {
        n: tree_map(lambda x, n=n: lay(x, sbp if written[n] else B, placement, rank), value)
        for n, value in kwargs.items()
    }
    function(*args, **kwargs)
    try:
        function(*mine, **named)
    except Exception as error:  # noqa: BLE001  (reported)
        return f"raises {type(error).__name__}: {str(error)[:200]}"
    for n, theirs, ours in [
        *zip(names, args, mine, strict=False),
        *((n, kwargs[n], named[n]) for n in kwargs),
    ]:
        for a, b in zip(tree_leaves(theirs), tree_leaves(ours), strict=True):
            if not isinstance(a, torch.Tensor):
                continue
            value = b.full() if b.__class__ is consistent.GlobalTensor else plain(b)
            if value.shape != a.shape or not torch.allclose(
                value.to(a.dtype), a, rtol=1e-6, atol=1e-9, equal_nan=True
            ):
                return f"{n} is {value.flatten()[:4].tolist()}, not {a.flatten()[:4].tolist()}"
    return ""


# A global tensor's shape is part of its spec: these are refused, see test_inspection.py.
# The last has no form without an output to write into.
REFUSED = frozenset(
    "as_strided_ resize resize_ resize_as resize_as_ adaptive_avg_pool3d_backward".split()
)

CASES = [case for case in schemas() if case[0] not in REFUSED]
if not IS_2_13:  # a global tensor's dims have no names
    CASES = [
        (name, overload) for name, overload in CASES
        if name != "rename_" and "dimname" not in overload.lower()
    ]  # fmt: skip

# No arguments are made for these: other tests call them (optimizers, scatter_reduce, numbers drawn
# at random, changes of shape), or nobody does.
UNDRAWN = frozenset(
    """_amp_foreach_non_finite_check_and_unscale.out _amp_update_scale.out
    _amp_update_scale_.default _batch_norm_with_update.out _coalesced_.default
    _cudnn_attention_forward_no_dropout_inplace.default _fill_mem_eff_dropout_mask_.default
    _flash_attention_forward_no_dropout_inplace.default
    _foreach_add_.Tensor _foreach_addcdiv_.Tensor _foreach_addcmul_.Tensor
    _foreach_div_.Tensor _foreach_mul_.Tensor _fused_adagrad.out
    _fused_adagrad.tensor_lr_out _fused_adagrad_.default _fused_adagrad_.tensor_lr
    _fused_adam.out _fused_adam.tensor_lr_out _fused_adam_.default _fused_adam_.tensor_lr
    _fused_adamw.out _fused_adamw.tensor_lr_out _fused_adamw_.default
    _fused_adamw_.tensor_lr _fused_moving_avg_obs_fq_helper.default
    _fused_moving_avg_obs_fq_helper.out _fused_sgd.out _fused_sgd.tensor_lr_out
    _fused_sgd_.default _fused_sgd_.tensor_lr _mkldnn_transpose_.default
    _no_grad_normal_.default _philox_normal_.default _philox_randint_.default
    _philox_uniform_.default
    _resize_output_.default _scaled_addmm_.default _sobol_engine_ff_.default
    _sobol_engine_scramble_.default addmv_.default addr_.default
    bernoulli_.Tensor bernoulli_.float cauchy_.default copy_sparse_to_sparse_.default
    exponential_.default fbgemm_linear_fp16_weight.out
    fbgemm_linear_fp16_weight_fp32_activation.out fused_moving_avg_obs_fake_quant.default
    geometric_.default index_fill_.int_Scalar index_reduce_.default log_normal_.default
    normal_.default random_.default record_stream.default resize_as_sparse_.default
    retain_grad.default scatter_.reduce scatter_.value_reduce set_.default
    set_.source_Storage set_.source_Storage_storage_offset sort.Tensor
    sparse_resize_.default sparse_resize_and_clear_.default squeeze_.dims uniform_.default
    unsqueeze_.default""".split()
)


def test_an_op_named_like_a_function_of_lists_writes_nothing() -> None:
    for name in ("sort", "remove", "index", "count", "copy"):
        for space in (torch, torch.Tensor, torch.ops.aten):
            if hasattr(space, name):
                assert written_arguments(getattr(space, name)) == (), (space, name)
    assert written_arguments(torch._foreach_add_) == ((0, "self"),)


@on_ranks(2)
def test_sorting_a_leaf_leaves_it_as_it_was(rank: int) -> None:
    for shape in ((1, 1), (3, 2), (4, 4)):
        x = consistent.distribute(
            torch.rand(shape), Placement("cpu", [0, 1]), S(1)
        ).requires_grad_()
        y = x.sin()
        torch.sort(x, 1)
        assert x._version == 0
        y.sum().backward()


@pytest.mark.parametrize("part", range(4))
def test_what_an_op_writes_to_holds_what_torch_writes(part: int) -> None:
    wrong, none = _tried(part)
    if wrong or not none <= UNDRAWN:
        # Some ops of torch read memory that nothing wrote, which may look settled, or not, once.
        wrong, none = _tried(part)
    assert not wrong, "\n".join(wrong)
    assert none <= UNDRAWN


def _tried(part: int) -> tuple[list[str], set[str]]:
    """What differs, and the ops for which no arguments were found."""
    cases, none = [], set()
    for name, overload in CASES[part::4]:
        # Drawn here and not on each rank: all of them are to make the same calls.
        ways = list(drawn(name, overload))
        layouts = (LAYOUTS, LAYOUTS) if ALL else (LAYOUTS[:2], LAYOUTS[2:])
        cases += [(name, overload, *each) for each in zip(ways, layouts, strict=False)]
        schema = getattr(getattr(torch.ops.aten, name), overload)._schema
        if not ways and any(_written(a) and not a.is_out for a in schema.arguments):
            none.add(f"{name}.{overload}")
    return simulate(differs, 2, cases)[0], none
