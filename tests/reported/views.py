"""Views, indices, joins and pieces of split tensors, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import consistent
from consistent import B, P, S

from .report import report
from .worlds import World, grads, rand


@report(
    "pytorch/pytorch", 179502,
    "[DTensor] sharded view incorrectly passes when redistribution is needed",
    said="rows of a view of columns come in another order",
)  # fmt: skip
def view_of_split_columns(w: World) -> Any:
    return w.lay(rand(12, 8), S(1)).reshape(16, 6)


@report(
    "pytorch/pytorch", 143372, "Error in DTensor uneven shard view op",
    said="raises on the ranks whose sizes do not fit",
)  # fmt: skip
def flat_view_of_uneven_rows(w: World) -> Any:
    return w.lay(rand(5, 4), S(0)).view(-1)


@report(
    "pytorch/pytorch", 139735, "DTensor silent failure of index slice",
    said="`nn.init.zeros_(x[:2])` writes no zeros",
)  # fmt: skip
def writing_into_a_slice(w: World) -> Any:
    x = w.lay(torch.ones(8, 8), S(0))
    with torch.no_grad():
        nn.init.zeros_(x[:2])
    return x


@report(
    "pytorch/pytorch", 173964, "[DTensor] Fix t() sharding strategy for 1D tensors",
    said="split along a dim that there is not",
)  # fmt: skip
def transpose_of_a_vector(w: World) -> Any:
    return w.lay(rand(4), S(0)).t() * 2


@report(
    "pytorch/pytorch", 172350, "DTensor index_put strategy includes illegal sharding",
    said="each rank writes its own values at the indices of all",
)  # fmt: skip
def writing_split_values(w: World) -> Any:
    x, value = w.lay(torch.zeros(4, 4), S(0)), w.lay(torch.arange(1.0, 5.0), S(0))
    at = w.lay(torch.arange(4), B)
    return x.index_put((at, at), value)


@report(
    "pytorch/pytorch", 170934, "[DTensor] index_put on sharded dimension fails",
    said="raises: global indices meet a shard's rows",
)  # fmt: skip
def writing_along_a_split_dim(w: World) -> Any:
    x, value = w.lay(torch.zeros(16), S(0)), w.lay(torch.arange(16.0), S(0))
    return x.index_put((w.lay(torch.arange(16).flip(0), S(0)),), value)


@report(
    "pytorch/pytorch", 118461, "[DTensor] DTensor fails to execute backward of index_put op.",
    said="raises in backward",
)  # fmt: skip
def gradient_of_writing(w: World) -> Any:
    x, value = w.leaf(rand(4, 3), S(0)), w.leaf(rand(2, 3, seed=1), B)
    out = x.index_put((w.lay(torch.tensor([0, 3]), B),), value)
    return grads((out * out).sum(), x, value)


@report(
    "pytorch/pytorch", 179136, "[DTensor] Backward failure in index selection",
    said="raises in backward",
)  # fmt: skip
def gradient_of_an_index(w: World) -> Any:
    x = w.leaf(torch.arange(8.0).view(1, 8), B)
    return grads(x[:, w.lay(torch.tensor([1, 3, 5]), B)].square().sum(), x)


@report(
    "pytorch/pytorch", 178582, "torch.topk backward failed on DTensor input",
    said="raises in backward",
)  # fmt: skip
def gradient_of_topk(w: World) -> Any:
    x = w.leaf(rand(4, 9, 2), S(0))
    return grads(x.topk(2, dim=1)[0].square().sum(), x)


@report(
    "pytorch/pytorch", 185362, "[DTensor] backward fails for cumprod, cummax, cummin",
    said="raises in backward",
)  # fmt: skip
def gradients_of_running_products_and_extremes(w: World) -> Any:
    x = w.leaf(rand(6, 3), S(0))
    out = torch.cumprod(x, 0) + torch.cummax(x, 0)[0] * 2 + torch.cummin(x, 0)[0]
    return grads(out.square().sum(), x)


@report(
    "Oneflow-Inc/oneflow", 8920, "flow.cumprod不支持sbp模式，或sbp模式实现存在bug",
    said="the gradient of `cumprod` of a global tensor raises",
)  # fmt: skip
def gradient_of_running_products(w: World) -> Any:
    x, weight = w.lay(rand(1, 10), S(1)), w.leaf(rand(1, 10, seed=1), B)
    return grads(torch.cumprod(x * weight, 1).sum(), weight)


@report(
    "Oneflow-Inc/oneflow", 8194, "backward of stack is wrong when sbp is s1",
    said="each rank has the gradient of the other's columns",
)  # fmt: skip
def gradient_of_stack(w: World) -> Any:
    a, b = w.leaf(rand(2, 2), S(1)), w.leaf(rand(2, 2, seed=1), S(1))
    out = torch.stack((a, b), dim=0)
    return grads((out * w.lay(torch.arange(8.0).view(2, 2, 2), B)).sum(), a, b)


@report(
    "Oneflow-Inc/oneflow", 7020, "Consistent tensor indexing",
    said="`x[1]` of 3 rows on 2 ranks ends the process",
)  # fmt: skip
def one_of_uneven_rows(w: World) -> Any:
    x = w.leaf(rand(3, 4, 5), S(0))
    return [x[1], *grads(x[1].square().sum(), x)]


@report(
    "jax-ml/jax", 24576,
    "Functions like `jax.numpy.concatenate` are not compatible with `jax.sharding`, resulting in "
    "improper functioning",
    said="values come out doubled",
)  # fmt: skip
def joining_split_tensors(w: World) -> Any:
    return torch.cat([w.lay(torch.ones(4), S(0)), w.lay(torch.ones(12), S(0))])


@report(
    "jax-ml/jax", 19106,
    "jnp.concatenate returns incorrect values for sharded arrays in chex multi-device CPU test "
    "environment",
    said="a whole and a split array joined: 4 for 1",
)  # fmt: skip
def joining_a_whole_and_a_split_tensor(w: World) -> Any:
    return torch.cat([w.lay(torch.ones(2), B), w.lay(torch.ones(10), S(0))])


@report(
    "jax-ml/jax", 18434,
    "Inconsistent behaviour of jited and non jited array assignment function on some "
    "`PositionalSharding` topologies.",
    said="rows at the border of shards are another device's",
)  # fmt: skip
def shifting_rows(w: World) -> Any:
    x = w.lay(rand(9, 3), S(0))
    return torch.cat([x[1:], w.lay(torch.ones(1, 3, dtype=torch.float64), B)])


# -- pieces ----------------------------------------------------------------------------------------


@report(
    "pytorch/pytorch", 103306, "DTensor uneven sharding corner cases.",
    said="5 rows split on 4 ranks come back as 8",
)  # fmt: skip
def split_and_whole_again(w: World) -> Any:
    return w.relay(w.relay(w.lay(rand(5, 10), B), S(0)), B)


def _mine(whole: Tensor) -> Tensor:
    """This rank's balanced piece."""
    return whole.tensor_split(dist.get_world_size())[dist.get_rank()]


def _shape_of_pieces_there(w: World) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    return list(DTensor.from_local(_mine(rand(5, 2)), w.mesh, [Shard(0)]).shape)  # type: ignore[attr-defined]


@report(
    "pytorch/pytorch", 110762,
    "[DTensor] DTensor.from_local() creates DTensor with wrong .shape/.size() for un-even sharding "
    "case",
    said="ranks have shapes of their own: their piece's times the ranks",
    there=_shape_of_pieces_there,
)  # fmt: skip
def shape_of_pieces(w: World) -> Any:
    whole = rand(5, 2)
    if not dist.is_initialized() or type(w) is World:
        return list(whole.shape)
    return list(consistent.from_local(_mine(whole), w.placement, S(0)).shape)  # type: ignore[attr-defined]


@report(
    "pytorch/pytorch", 144109,
    "Uneven Sharding in DTensor Leads to unexpected tensor resolution with `full_tensor`",
    said="pieces of 3 rows and 1 are put together wrongly",
    there=None, refused=ValueError,
)  # fmt: skip
def unbalanced_pieces(w: World) -> Any:
    whole = rand(4, 2)
    if type(w) is World:
        return whole
    piece = whole[slice(0, 3) if dist.get_rank() == 0 else slice(3, 4)]
    return consistent.from_local(piece, w.placement, S(0))  # type: ignore[attr-defined]


def _local_map_there(w: World) -> Any:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.experimental import local_map

    doubled = local_map(lambda x: x * 2, out_placements=[Shard(0)])
    out: Any = doubled(w.lay(rand(5, 3), S(0)))
    return out.sum(0) / out.shape[0]


@report(
    "pytorch/pytorch", 172812,
    "🐛 Bug: `local_map` produces incorrect results with uneven sharding",
    said="the result of a function of shards has another size",
    there=_local_map_there,
)  # fmt: skip
def function_of_uneven_shards(w: World) -> Any:
    x = w.lay(rand(5, 3), S(0))
    out = x * 2
    if type(w) is not World:
        out = consistent.from_local(x.to_local() * 2, x.placement, S(0))
    return out.sum(0) / out.shape[0]


def _addends_unwrapped_there(w: World) -> Any:
    from torch.distributed.tensor import DTensor, Partial

    x = w.leaf(rand(4), S(0))
    total: Any = (x * x).sum()
    again: Any = DTensor.from_local(total.to_local(), w.mesh, [Partial()])  # type: ignore[attr-defined]
    return grads((again * 3).redistribute(placements=[_replicate()]).to_local(), x)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


@report(
    "pytorch/pytorch", 172932,
    "[DTensor] `to_local` + `from_local` on `Partial` DTensor produce different gradient",
    said="unwrapping addends and wrapping them again changes the gradient",
    there=_addends_unwrapped_there,
)  # fmt: skip
def addends_unwrapped_and_wrapped(w: World) -> Any:
    x = w.leaf(rand(4), S(0))
    total = (x * x).sum()
    if type(w) is not World:
        total = consistent.from_local(total.to_local(), total.placement, P)
    return grads(total * 3, x)
