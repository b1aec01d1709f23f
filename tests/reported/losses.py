"""Losses: means over uneven parts, vocabularies in shards, micro-batches, evaluation."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import consistent
from consistent import B, S

from .report import report
from .worlds import World, grads, integers, rand

IGNORED = -100


def _log_softmax_there(w: World) -> Any:
    from torch.distributed.tensor.parallel import loss_parallel

    x = w.leaf(rand(4, 6), S(1))
    with loss_parallel():
        return grads(F.log_softmax(x, -1)[:, 0].sum(), x)


@report(
    "pytorch/pytorch", 190746,
    "[DTensor] loss_parallel() gives identity gradients to any log_softmax not consumed by "
    "cross_entropy",
    said="the gradient lacks the term of the softmax",
    there=_log_softmax_there,
)  # fmt: skip
def log_softmax_of_a_split_vocabulary(w: World) -> Any:
    x = w.leaf(rand(4, 6), S(1))
    return grads(F.log_softmax(x, -1)[:, 0].sum(), x)


@report(
    "NVIDIA/Megatron-LM", 7452,
    "Silent numerical-correctness bugs in Megatron Core parallelism composition",
    said="gathered logits in a loss for split ones: off by log 2, 1.1333 for 0.4402",
    there=None,
)  # fmt: skip
def loss_of_gathered_logits(w: World) -> Any:
    logits = w.leaf(torch.arange(4.0).view(1, 4), S(1))
    whole, label = w.relay(logits, B), w.lay(torch.tensor([3]), B)
    loss = F.cross_entropy(whole, label) + F.cross_entropy(logits, label)
    return [loss, *grads(loss, logits)]


def _net() -> Any:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.copy_(rand(*p.shape, seed=k))
    return net


def _uneven_batches_ddp(w: World) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(_net())
    mine = [x.tensor_split(dist.get_world_size())[dist.get_rank()] for x in _batch(7)]
    F.cross_entropy(model(mine[0]), mine[1]).backward()
    return [p.grad for p in model.parameters()]


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    return rand(rows, 4, seed=9), integers(3, rows)


@report(
    "pytorch/pytorch", 67253, "Support different batch size across GPUs with DDP",
    said="gradients are averaged over ranks, however many rows each has",
    there=_uneven_batches_ddp,
)  # fmt: skip
def gradients_of_an_odd_batch(w: World) -> Any:
    model = w.model(_net(), "data")
    x, y = (w.lay(t, S(0)) for t in _batch(7))
    F.cross_entropy(model(x), y).backward()
    return [p.grad for p in model.parameters()]


def _mean_of_means(w: World) -> Any:
    mine = [x.tensor_split(dist.get_world_size())[dist.get_rank()] for x in _batch(13)]
    loss = F.cross_entropy(_net()(mine[0]), mine[1]).detach()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


@report(
    "huggingface/transformers", 608,
    "when using multiple GPUs, `loss.mean()` may have subtle bias",
    said="13 rows on 2 ranks: the mean of means of 7 and 6",
    there=_mean_of_means,
)  # fmt: skip
def loss_of_an_odd_batch(w: World) -> Any:
    x, y = (w.lay(t, S(0)) for t in _batch(13))
    return F.cross_entropy(w.model(_net(), "data")(x), y)


def _labels() -> Tensor:
    """Of the first rows few count, of the last rows many."""
    labels = integers(3, 8)
    labels[:3] = IGNORED
    return labels


@report(
    "huggingface/transformers", 37766,
    "[Trainer] As gradient_accumulation_steps increases, the loss also increases",
    said="each part is divided by its own number of tokens",
    there=None,
)  # fmt: skip
def parts_with_other_numbers_of_tokens(w: World) -> Any:
    model, (x, _), labels = w.model(_net(), "data"), _batch(8), _labels()
    count = (labels != IGNORED).sum().item()
    loss = torch.tensor(0.0)
    for rows in (slice(0, 4), slice(4, 8)):
        out = model(w.lay(x[rows], S(0)))
        part = F.cross_entropy(out, w.lay(labels[rows], S(0)), reduction="sum") / count
        part.backward()
        loss = loss + part.detach()
    whole = F.cross_entropy(model(w.lay(x, S(0))), w.lay(labels, S(0)))
    return [loss, whole, *(p.grad for p in model.parameters())]


@report(
    "NVIDIA/Megatron-LM", 3672,
    "Global auxiliary loss gradient incorrectly scaled due to averaging over global token count",
    said="the gradient of the load-balancing loss is divided by the number of ranks",
    there=None,
)  # fmt: skip
def load_balancing_loss_over_all_ranks(w: World) -> Any:
    logits = w.leaf(rand(10, 4), S(0))
    probability = logits.softmax(-1)
    chosen = F.one_hot(probability.argmax(-1), 4).double()
    loss = 4 * (chosen.mean(0) * probability.mean(0)).sum()
    return [loss, *grads(loss, logits)]


@report(
    "NVIDIA/Megatron-LM", 1652,
    "[BUG] aux_loss and z_loss is incorrect when use calculate_per_token_loss and cp",
    said="divided twice by the number of tokens, once by a wrong one",
    there=None,
)  # fmt: skip
def router_losses_per_token(w: World) -> Any:
    logits = w.leaf(rand(3, 8, 4), S(1))  # the sequence is split
    tokens = logits.shape[0] * logits.shape[1]
    z_loss = logits.logsumexp(-1).square().sum() / tokens
    probability = logits.softmax(-1).flatten(0, 1)
    balance = probability.mean(0).square().sum() * 4
    loss = 1e-3 * z_loss + 1e-2 * balance
    return [loss, *grads(loss, logits)]


@report(
    "pytorch/torchtitan", 3412, "[loss] Fix ChunkedCELoss + TP gradient placement mismatch",
    said="addends of the chunks' gradients are taken for the whole",
    there=None,
)  # fmt: skip
def loss_in_chunks_over_a_split_head(w: World) -> Any:
    hidden, head = w.leaf(rand(8, 4), B), w.leaf(rand(6, 4, seed=1), S(0))
    labels, gradients, total = w.lay(integers(6, 8), B), [], 0.0
    for rows in (slice(0, 4), slice(4, 8)):
        chunk = hidden[rows].detach().requires_grad_()
        loss = F.cross_entropy(F.linear(chunk, head), labels[rows], reduction="sum") / 8
        loss.backward()
        gradients.append(chunk.grad)
        total = total + loss.detach()
    return [total, torch.cat(gradients), head.grad]


# -- evaluation ------------------------------------------------------------------------------------


def _data(rows: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(rows)))


def _batches(w: World, rows: int, size: int) -> Any:
    batches = DataLoader(_data(rows), batch_size=size)
    return batches if type(w) is World else consistent.data.loader(batches, w.placement)  # type: ignore[attr-defined]


def _counted_there(w: World) -> Any:
    sampler = DistributedSampler(_data(11), shuffle=False)
    total = torch.tensor(0.0)
    for (x,) in DataLoader(_data(11), batch_size=2, sampler=sampler):
        total += len(x)
    dist.all_reduce(total)
    return total


@report(
    "huggingface/accelerate", 226, "About the use of gather to compute metrics",
    said="10,167 samples are gathered of a test set of 10,000",
    there=_counted_there,
)  # fmt: skip
def samples_that_are_evaluated(w: World) -> Any:
    return float(sum(x.shape[0] for (x,) in _batches(w, 11, 4)))


def _gathered_there(w: World) -> Any:
    sampler = DistributedSampler(_data(11), shuffle=False)
    sums = torch.zeros(2)
    for (x,) in DataLoader(_data(11), batch_size=2, sampler=sampler):
        sums += torch.stack([x.mean(), torch.tensor(1.0)])
    dist.all_reduce(sums)
    return sums[0] / sums[1]


@report(
    "huggingface/accelerate", 956, "Un-needed (wrong?) code in example script",
    said="the mean of the batches' losses, of which the last has fewer rows",
    there=_gathered_there,
)  # fmt: skip
def mean_over_uneven_batches(w: World) -> Any:
    total, count = 0.0, 0
    for (x,) in _batches(w, 11, 4):
        total, count = total + x.sum().item(), count + x.shape[0]
    return total / count


@report(
    "huggingface/accelerate", 952, "gather_for_metrics ignores the last batch of data",
    said="predictions of the last batch are missing",
    there=None,
)  # fmt: skip
def predictions_of_the_last_batch(w: World) -> Any:
    found = [w.read(x) for (x,) in _batches(w, 9, 4)]
    return torch.cat(found)


@report(
    "huggingface/accelerate", 1674,
    "Incorrect `gather_for_metrics` evaluation with multiple GPUs and uneven batch sizes",
    said="a ratio of counts is off where batches are uneven",
    there=None,
)  # fmt: skip
def ratio_over_uneven_batches(w: World) -> Any:
    right = sum((x < 7).sum().item() for (x,) in _batches(w, 10, 4))
    return right / 10


@report(
    "pytorch/pytorch", 38174, "[RFC] Join-based API to support uneven inputs in DDP",
    said="ranks that have a batch more wait for ever",
    there=None,
)  # fmt: skip
def training_on_an_odd_number_of_rows(w: World) -> Any:
    model = w.model(nn.Linear(1, 1), "data")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for (x,) in _batches(w, 5, 4):
        optimizer.zero_grad()
        model(x[:, None]).square().mean().backward()
        optimizer.step()
    return list(model.parameters())
