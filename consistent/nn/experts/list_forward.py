"""Run the forward of a module with a list of experts on the ranks that hold each token's experts.

```
                      rank 0                     rank 1
tokens, masks         of its batch               of its batch                global, S(0)
the forward           its loop is recorded (loop.py); no expert runs
sent                  rows of experts 0, 1       rows of experts 2, 3        plain
experts, each once    experts.0, experts.1       experts.2, experts.3        plain
sent back, weighted   tokens of its batch        tokens of its batch         global, S(0)
```

Parameters keep their names. Each is split so that one rank has all of it. Another axis may split
it, too, if it is gathered for use (``zero3``): it is gathered before its expert runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ...dispatch.plans.shards import adopt, attach, is_global
from ...forms.whole_numbers import read_ints
from ...movement.differentiable import shard_of_plain
from ...movement.world import my_coordinate
from ...spec import B
from ..plan import Nd, Plan
from .forward import expert_owners, spec_to_send
from .lists import ExpertList, names_in_forward, sbp_on_one_rank
from .loop import Addends, Loop
from .replaced import ReplacedForward, attributes_replaced, restore_forward
from .routed import Routed, check_rows, run_routed
from .selected import ExpertResult, SelectedEntries, materialize

_forward_numbers = itertools.count()  # equal on all ranks for one module


def install_list(expert_list: ExpertList, plan: Plan) -> None:
    """Make ``expert_list`` send tokens to its experts, if ``plan`` puts each expert on one rank.

    The forward of the module that calls the experts is replaced by a ``ListForward``, and that of
    each expert by an ``ExpertCall``.
    """
    uses = [
        {key: plan.layouts(f"{expert_list.name}.{e}.{key}") for key in expert_list.keys}
        for e in expert_list.experts
    ]
    if any(layouts is None for each in uses for layouts in each.values()):
        return
    used = [{key: layouts.use for key, layouts in each.items()} for each in uses]  # type: ignore[union-attr]
    axes = _axes_of_experts(list(expert_list.experts.values()), used)
    if axes and not isinstance(expert_list.host.__dict__.get("forward"), ListForward):
        forward = ListForward(expert_list, axes, used)
        forward.install()
        for e in range(len(forward.experts)):
            ExpertCall(forward, e).install()


def _axes_of_experts(
    experts: Sequence[nn.Module], used: Sequence[Mapping[str, Nd]]
) -> tuple[int, ...]:
    """Return the placement axis along which each expert is on one rank, as a tuple of one.

    ``()`` if there is none, or if another axis splits the experts' tensors in use.

    Args:
        experts: the experts, in order.
        used: for each expert, key of a parameter -> the layout in which it is used.
    """
    dividing_axes = list[int]()
    shapes = [dict(each.named_parameters()) for each in experts]
    for axis in range(len(next(iter(used[0].values())))):
        entries: list[Any] = [each[key][axis] for each in used for key in each]
        sizes = next((e.cut.sizes for e in entries if e.is_split and e.cut), None)
        is_divided = sizes is not None and all(
            each[key][axis] is sbp_on_one_rank(shapes[e][key].shape[0], e, len(experts), len(sizes))
            for e, each in enumerate(used)
            for key in each
        )
        if is_divided:
            dividing_axes.append(axis)
        elif any(entry is not B for entry in entries):
            return ()
    return tuple(dividing_axes) if len(dividing_axes) == 1 else ()


def uninstall_list(part: nn.Module) -> None:
    """Undo ``install_list`` for ``part``, if its forward was replaced by a ``ListForward``."""
    forward = part.__dict__.get("forward")
    if isinstance(forward, ListForward):
        for module in (part, *forward.experts):
            restore_forward(module)


def parameters_of_lists(module: nn.Module) -> set[int]:
    """Return the ids of parameters of experts that a ``ListForward`` inside ``module`` gathers.

    ``install_use`` does not gather these.
    """
    forwards = [part.__dict__.get("forward") for part in module.modules()]
    experts = [x for each in forwards if isinstance(each, ListForward) for x in each.experts]
    return {id(p) for expert in experts for p in expert.parameters()}


class ListForward(ReplacedForward):
    """Forward of a module that loops over a list of experts, each of which is on one rank.

    It runs the module's own forward in a ``Loop``, a mode that collects the calls of experts. At
    the end tokens are sent to the ranks of their experts, all experts run, and the results are
    sent back and added.

    Args:
        expert_list: the list.
        axes: the axis of the parameters' placement along which the experts are divided.
        used: for each expert, the layouts in which its parameters are used.
    """

    def __init__(
        self, expert_list: ExpertList, axes: tuple[int, ...], used: Sequence[Mapping[str, Nd]]
    ) -> None:
        super().__init__(expert_list.host)
        self.name, self.axes, self.used = expert_list.name, axes, used
        self.experts = list(expert_list.experts.values())
        self.number = next(_forward_numbers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._can_defer():
            return self.original_forward(*args, **kwargs)
        loop = Loop(self.run_expert, self._add_all)
        with loop.following():
            out = self.original_forward(*args, **kwargs)
        return materialize(out)

    def _can_defer(self) -> bool:
        """Return whether the experts may run after the loop, on plain rows from all ranks.

        If not, the loop runs as it is written. Experts with hooks may not, nor may experts that
        draw random numbers: drawn on global tensors, these do not depend on layouts; on rows, they
        would.
        """
        parts = [part for expert in self.experts for part in expert.modules()]
        params = [p for expert in self.experts for p in expert.parameters()]
        return (
            all(map(is_global, params))
            and not any(_has_hooks(part) for part in parts)
            and not _calls_autograd_function(self.module)
            and not any(part.training and _draws_random_numbers(part) for part in parts)
        )

    def run_expert(self, e: int, *args: Any, **kwargs: Any) -> Any:
        """Run only expert ``e``, on global tensors, and return what it returns.

        Used for calls of experts that cannot be collected.
        """
        expert: Any = self.experts[e]
        with attributes_replaced(expert, self._params_in_use(e)):
            return expert.__dict__["forward"].original_forward(*args, **kwargs)

    def _params_in_use(self, e: int) -> dict[str, Any]:
        """Return the parameters of expert ``e`` in the layouts in which they are used."""
        used = self.used[e]
        params = self.experts[e].named_parameters()
        return {key: p.to_global(sbp=used[key]) for key, p in params}  # type: ignore[attr-defined]

    def _add_all(self, addends: Addends) -> bool:
        """Run all collected calls of experts by sending tokens, and add the results.

        Args:
            addends: the calls, and the tensor to which the loop adds their results.

        Returns:
            whether it was done. False if the layouts do not allow it, which depends on specs only,
            so it is the same on all ranks.
        """
        called = sorted({result.expert for result in addends.results})
        params = [p for e in called for p in self.experts[e].parameters()]
        if not is_global(addends.x):
            return False
        x = addends.x.flatten(0, -2)
        spec = spec_to_send([x, *params], 1, self.axes)
        if spec is None:
            return False
        masks, weights, columns, picks = _masks_and_weights(addends.results, x)
        weights = adopt(weights, spec.placement, "experts")  # they may be plain
        spec = spec_to_send([x, masks, weights, *params], 1, self.axes)
        if spec is None:
            return False
        out = self._run_routed_list(
            [x, masks, weights], spec, called, columns, picks, addends.out.dtype
        )
        out = out.reshape(addends.out.shape)
        if addends.is_fresh and not is_global(addends.out):
            addends.out.data = shard_of_plain(
                addends.out.detach(), out._spec.with_dtype(addends.out.dtype)
            )
            attach(addends.out, out._spec.with_dtype(addends.out.dtype))
        addends.out.add_(out.to(addends.out.dtype))
        return True

    def _run_routed_list(
        self,
        inputs: list[Any],
        spec: Any,
        called: Sequence[int],
        columns: Sequence[int],
        picks: Sequence[int],
        dtype: torch.dtype,
    ) -> Any:
        """Return the results of the experts for all tokens, added up for each token.

        Args:
            inputs: the tokens, and the masks and weights of ``_masks_and_weights``; global tensors.
            spec: the spec to which these are boxed.
            called, columns, picks: as in ``RoutedList``.
            dtype: the dtype in which results are added.
        """
        at = my_coordinate(spec.placement)
        assert at is not None
        in_use = [p for e in called for p in self._params_in_use(e).values()]
        boxed_inputs = [each.to_global(sbp=spec.sbp) for each in inputs]
        shapes = tuple(tuple(p.shape) for p in self.experts[0].parameters())
        run = RoutedList(
            expert_owners(spec.placement, self.axes, len(self.experts), at),
            self,
            tuple(called),
            tuple(columns),
            tuple(picks),
            shapes,
            dtype,
        )
        return run_routed(run, [each.to_local() for each in (*boxed_inputs, *in_use)], spec)


class ExpertCall(ReplacedForward):
    """Forward of an expert in a list, which the loop of a ``ListForward`` calls.

    If it gets rows that the loop has selected, the call is collected, to be run with all others.
    Otherwise the expert runs at once.

    Args:
        forward: the forward of the module that loops over the experts.
        number: the index of the expert.
    """

    def __init__(self, forward: ListForward, number: int) -> None:
        super().__init__(forward.experts[number])
        self.forward, self.number = forward, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(rows, SelectedEntries) and not rows.is_closed:
            if rows.loop.run_expert == self.forward.run_expert:
                return rows.loop.defer_expert(self.number, rows)
        return self.forward.run_expert(self.number, *materialize(args), **materialize(kwargs))


def _calls_autograd_function(part: nn.Module) -> bool:
    """Return whether the forward of ``part`` calls autograd Functions or checkpoints.

    Torch handles only those of their arguments that are tensors, and rows that the loop selects
    are not tensors yet (``Selected``).
    """
    return not {"apply", "checkpoint"}.isdisjoint(names_in_forward(part))


def _has_hooks(part: nn.Module) -> bool:
    return bool(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
    )


_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
)  # fmt: skip

_RANDOM = frozenset(
    """dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu bernoulli
    multinomial gumbel_softmax rand randn randint rand_like randn_like randint_like normal
    uniform""".split()
)
"""Names of functions that draw random numbers, without the underscore of those in place."""


def _draws_random_numbers(part: nn.Module) -> bool:
    """Return whether ``part`` draws random numbers in training, as dropout does."""
    if isinstance(part, _DROPOUTS):
        return part.p > 0
    # An attribute of this name that is a module is looked at by itself.
    return any(
        name.rstrip("_") in _RANDOM and not isinstance(getattr(part, name, None), nn.Module)
        for name in names_in_forward(part)
    )


# -- a loop as tensors of fixed shapes -------------------------------------------------------------


def _masks_and_weights(
    results: Sequence[ExpertResult], x: Any
) -> tuple[Any, Any, list[int], list[int]]:
    """Return the masks and the weights of a loop's results as two tensors [tokens, columns].

    A column of the masks says which tokens one call of an expert has taken.

    Args:
        results: the collected results.
        x: the tokens.

    Returns:
        masks; weights, whose columns may be shared; for each column of the masks the index of its
        expert; and for each the column of its weights.
    """
    masks, weights = list[Any](), list[Any]()
    columns, picks = list[int](), list[int]()
    first_column: dict[Any, int] = {}
    for result in results:
        entries = _mask_by_token(result.rows)
        masks.append(entries)
        columns += [result.expert] * entries.shape[1]
        key: Any = [
            (id(s.source), s.dims) if isinstance(s, SelectedEntries) else s for s in result.scales
        ]
        key = (*key, result.rows.dims, entries.shape[1])
        if key not in first_column:
            first_column[key] = sum(each.shape[1] for each in weights)
            weights.append(_product_of_weights(result, entries, x))
        picks += range(first_column[key], first_column[key] + entries.shape[1])
    return torch.cat(masks, 1), torch.cat(weights, 1), columns, picks


def _mask_by_token(rows: SelectedEntries) -> Any:
    """Return the mask of ``rows`` as bools [tokens, columns], with all other dims in the columns.

    A mask [k, tokens], where k is the number of choices of a token, becomes [tokens, k].
    """
    mask = rows.mask if rows.mask.dtype is torch.bool else rows.mask != 0
    return _as_token_columns(mask, _token_dims_first(rows), len(rows.dims))


def _token_dims_first(rows: SelectedEntries) -> list[int]:
    """Return the order of the mask's dims in which those of tokens come first."""
    return [*rows.dims, *(d for d in range(rows.mask.ndim) if d not in rows.dims)]


def _as_token_columns(x: Any, order: Sequence[int], tokens: int) -> Any:
    """Return ``x`` as [tokens, columns], after permuting its dims to ``order``.

    The first ``tokens`` dims of that order are those of tokens.
    """
    return x.permute(*order).flatten(0, tokens - 1).flatten(1) if x.ndim > 1 else x[:, None]


def _product_of_weights(result: ExpertResult, entries: Any, x: Any) -> Any:
    """Return the weights of an expert's result, [tokens, columns], as the product of all factors.

    Args:
        result: the result.
        entries: its mask, [tokens, columns].
        x: the tokens. Without factors the weights are ones, in the dtype of the tokens.
    """
    weights = [
        _weight_by_token(each, result.rows, entries)
        for each in result.scales
        if isinstance(each, SelectedEntries)
    ]
    product = weights[0] if weights else torch.ones_like(entries, dtype=x.dtype)
    for weight in (*weights[1:], *(n for n in result.scales if not isinstance(n, SelectedEntries))):
        product = product * weight
    return product


def _weight_by_token(scale: SelectedEntries, rows: SelectedEntries, entries: Any) -> Any:
    """Return one factor of a result as [tokens, columns], for all entries, selected or not.

    Args:
        scale: the factor, as selected by the loop.
        rows: the rows that the expert takes.
        entries: their mask, [tokens, columns].
    """
    source = scale.source.reshape(scale.source.shape[: len(scale.dims)])  # then dims of size 1
    if scale.mask is not rows.mask:  # another view of the same mask
        return source.reshape(entries.shape)
    order = _token_dims_first(rows)
    source = source.permute(*(scale.dims.index(d) for d in order if d in scale.dims))
    expanded = source[tuple(slice(None) if d in scale.dims else None for d in order)]
    sizes = [rows.mask.shape[d] for d in order]
    return _as_token_columns(expanded.expand(sizes), range(len(order)), len(rows.dims))


# -- on plain tensors ------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class RoutedList(Routed):
    """Routing through a list of experts, for the calls that a loop has made.

    Args:
        forward: the forward of the module that calls them.
        called: the experts that were called, ascending. Their tensors are passed in this order.
        columns: the index of the expert for each column of the masks.
        picks: for each column of the masks, the column of its weights.
        shapes: the shapes of the tensors of an expert.
        sum_dtype: the dtype of the sum to which the loop adds results. Under autocast results have
            a shorter dtype, to which their sum must not be rounded.
    """

    forward: ListForward
    called: tuple[int, ...]
    columns: tuple[int, ...]
    picks: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    sum_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.sum_dtype

    def choices(self, choices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token and their weights, [tokens, k].

        ``choices`` are masks [tokens, columns], most of which choose nothing. k is the largest
        number of columns that any token chooses; other places get the number of a dropped choice.
        """
        most_choices = torch.cat([choices.sum(1), choices.new_ones(1, dtype=torch.int64)]).max()
        default_k = len(self.columns) // len(self.called)
        (k,) = read_ints(most_choices[None], lambda: [default_k])
        order = (~choices).to(torch.uint8).argsort(dim=1, stable=True)[:, :k]
        columns, picks = (order.new_tensor(x)[order] for x in (self.columns, self.picks))
        dropped = sum(self.owners.sizes)
        return columns.where(choices.gather(1, order), dropped), weights.gather(1, picks)

    def run_experts(self, rows: Tensor, expert: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        first, count = sum(self.owners.sizes[: self.owners.me]), self.owners.sizes[self.owners.me]
        order = expert.argsort(stable=True).to(rows.device)
        sizes = expert.bincount(minlength=count).tolist()
        parts = rows.index_select(0, order).split(sizes)
        outputs = list[Tensor]()
        for i, e in enumerate(self.called):
            params = tensors[i * len(self.shapes) : (i + 1) * len(self.shapes)]
            if first <= e < first + count:
                outputs.append(self._run_expert(e, parts[e - first], params))
        if not outputs:  # run an expert on no rows, for the shape and dtype of the output
            zeros = [x.new_zeros(shape) for x, shape in zip(tensors, self.shapes, strict=False)]
            outputs = [self._run_expert(self.called[0], rows, zeros)]
        out = torch.cat(outputs)
        out = out.new_empty(out.shape).index_copy(0, order, out)
        if not torch.is_grad_enabled():
            return out
        return _WithZeroGradients.apply(out, *_tensors_not_in_graph(out, [rows, *tensors]))

    def _run_expert(self, e: int, rows: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Return what expert ``e`` makes of ``rows``, with ``tensors`` as its parameters."""
        expert: Any = self.forward.experts[e]
        keys = [key for key, _ in expert.named_parameters()]
        with attributes_replaced(expert, dict(zip(keys, tensors, strict=True))):
            output = expert.__dict__["forward"].original_forward(rows)
        check_rows(output, rows, expert)
        return output

    def __repr__(self) -> str:
        name = f"experts of list {self.forward.number} {self.forward.name}"
        return f"{name} {self.called} {self.columns} {self.picks} {self.sum_dtype} {self.owners}"


class _WithZeroGradients(torch.autograd.Function):
    """Autograd function that returns ``out``, and gives ``parts`` gradients of zeros.

    The parts are tensors that ``out`` does not depend on, such as parameters of experts of other
    ranks, or of an expert without rows. With it all ranks have gradients of the same parameters,
    and so communicate alike in backward.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *map(torch.zeros_like, ctx.saved_tensors)


def _tensors_not_in_graph(out: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return those of ``tensors`` that need a gradient and on which ``out`` does not depend."""
    needed = [x for x in tensors if x.requires_grad]
    edges = [_gradient_edge(x) for x in needed]
    stops, seen = set(edges), set[Any]()
    stack = [_gradient_edge(out)] if out.requires_grad else []
    while stack:
        edge = stack.pop()
        if edge not in seen:
            seen.add(edge)
            if edge not in stops:
                stack += [each for each in edge[0].next_functions if each[0] is not None]
    return [x for x, edge in zip(needed, edges, strict=True) if edge not in seen]


def _gradient_edge(x: Tensor) -> tuple[Any, int]:
    """Return the gradient edge of ``x`` in the autograd graph, as (node, output number)."""
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr
