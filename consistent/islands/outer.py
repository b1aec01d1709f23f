r"""Outer optimizer: steps the parameters that islands share by the mean difference between islands.

```
island 0   start -> step, step, ... step -> its own      \
                                                           mean of (start - its own)  ->  start
island 1   start -> step, step, ... step -> its own      /                                  |
                     parameters of both  <--------------------------------------------------+
```

Every rank has a shard of each parameter and exchanges values with the ranks that have the same
shard in the other islands. Each rank sends only its own shard, and nothing is gathered inside an
island.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrored.every_rank import gathered
from mirrored.transports.torch_dist.islands import Between, Line

from ..dispatch.plans.shards import is_global, plain
from .meetings import Came, Meetings


@dataclass
class Part:
    """Parameters that islands average at the same step, with the state of their meetings.

    Attributes:
        name, names: the name of the part, and the names of its parameters.
        number: number of the next meeting of the part.
        met: number of the last meeting in which this island took part.
        late: whether the last meeting was held without this island.
        is_new: whether this island started after the others had already met.
    """

    name: str
    names: list[str]
    number: int = 1
    met: int = 0
    late: bool = False
    is_new: bool = False

    @property
    def meeting(self) -> str:
        """The name of the next meeting of this part."""
        return f"part {self.name}/{self.number}"


class Outer:
    """Outer optimizer, which ``Islands.outer`` returns: it averages parameters between islands.

    Attributes:
        steps: number of calls of `step` so far.
        optimizer: the outer optimizer; its learning rate may be changed. It steps copies of the
            parameters as they were when islands last met.
    """

    def __init__(
        self,
        between: Between,
        patience: float | None,
        model: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        every: int,
        parts: int,
        dtype: torch.dtype | None,
    ) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._meetings = Meetings(between, patience)
        came = self._first_meeting(between, named, (every, parts, dtype))
        # Only after the first meeting: islands now have the same arguments, so all raise.
        _check(named, every, parts, dtype)
        self.steps, self._every, self._dtype = 0, every, dtype
        self._params = named
        if came is not None:
            self._meetings.hold("first", came, lambda line, _: _from_first(line, named.values()))
        with torch.no_grad():
            self._start = {n: nn.Parameter(p.detach().clone()) for n, p in named.items()}
        self._parts = [Part(str(k), names) for k, names in enumerate(_dealt(named, parts))]
        for part in self._parts:
            part.is_new = came is None
        self.optimizer = optimizer(list(self._start.values()))

    @property
    def sent_bytes(self) -> int:
        """The number of bytes that this rank has sent to other islands."""
        return self._meetings.sent

    def step(self) -> bool:
        """Count one step of this island; call it after the step of the inner optimizer.

        Every ``every`` steps islands meet: the outer optimizer takes a step, and its result becomes
        the parameters on all islands.

        An island that comes too late to a meeting trains on alone, and joins the next meeting as
        soon as another island arrives there.

        Returns:
            Whether a meeting was held with this island.
        """
        self.steps += 1
        met = False
        for k, part in enumerate(self._parts, 1):
            # Part k of n is due at step every * k / n of each interval, the last part at its end.
            due = self.steps % self._every == self._every * k // len(self._parts) % self._every
            if due or part.late and self._meetings.begun(part.meeting):
                met = self._meet(part, ends=False) or met
        return met

    def finish(self) -> None:
        """Set each parameter to the mean over islands, at the end of training.

        The outer optimizer does not step, because no later step would correct how far it goes
        beyond the mean. All islands must call it; the parameters are then equal on all islands that
        meet.
        """
        for part in self._parts:
            self._meet(part, ends=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the step count, the parameters as of the last meeting, and the optimizer's state.

        They are the same on all islands, except between the meetings of different parts.
        """
        start = {name: x.detach() for name, x in self._start.items()}
        return {"steps": self.steps, "start": start, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.steps = state["steps"]
        with torch.no_grad():
            for name, x in state["start"].items():
                self._start[name].copy_(x)
        self.optimizer.load_state_dict(state["optimizer"])

    def _first_meeting(
        self, between: Between, named: Mapping[str, Tensor], figures: tuple[Any, ...]
    ) -> list[Came] | None:
        """Return the islands in the first meeting, after checking that they train the same model.

        Parameters and arguments must be equal. None if the others began without this island.

        Raises:
            ValueError: they differ.
        """
        text = "\n".join([*_described(named), str(figures)])
        mine = hashlib.sha256("".join(gathered(text)).encode()).hexdigest()
        came = self._meetings.come("first", {"digest": mine})
        others = [each.island for each in came or () if each.note["digest"] != mine]
        if others:
            raise ValueError(
                f"islands.outer: island {between.number} has {len(named)} parameters and (every, "
                f"parts, dtype) = {figures}, and islands {others} have others. Build the same "
                "model under the same plan on every island, and give the same figures."
            )
        return came

    @torch.no_grad()
    def _meet(self, part: Part, ends: bool) -> bool:
        """Average the parameters of ``part`` with the other islands, as the outer optimizer does.

        Args:
            part: the part.
            ends: at the end of training: make parameters the plain mean, without an optimizer step.

        Returns:
            whether this island took part.
        """
        note = {"met": part.met, "new": part.is_new, "ends": ends}
        came = self._meetings.come(part.meeting, note)
        if came is None:
            # Skip all meetings that were already held, up to the first one that this island can
            # still join.
            while came is None and self._meetings.is_over(part.meeting):
                part.number += 1
            part.late = True
            self._meetings.want(part.meeting)
            return False
        means = self._meetings.hold(
            part.meeting, came, lambda line, came: self._exchange(part, line, came)
        )
        for name, mean in means.items():
            start = self._start[name]
            start.grad = _laid_as(start, mean.view(_shard(start).shape))
        if any(each.note["ends"] for each in came):
            for start in (self._start[name] for name in part.names):
                start.sub_(start.grad)  # type: ignore[arg-type]
        else:
            self.optimizer.step()
        # The step above left other parts unchanged: their parameters have no gradient.
        self.optimizer.zero_grad()
        for name in part.names:
            self._params[name].copy_(self._start[name])
        part.met = part.number
        part.number += 1
        part.late = part.is_new = False
        return True

    def _exchange(self, part: Part, line: Line, came: list[Came]) -> dict[str, Tensor]:
        """Return the mean over islands of (start - current), for this rank's shards.

        Start is the parameter as of the last meeting. Islands that missed meetings or are new first
        get the state of an island that attended the last meeting.

        Args:
            part: the parameters.
            line: the connection between the islands.
            came: the islands that take part, with their notes.
        """
        # Computed before _bring overwrites the start: the progress of an island that missed
        # meetings counts from its own start.
        apart = {n: (_shard(self._start[n]) - _shard(self._params[n])).cpu() for n in part.names}
        last = max(each.note["met"] for each in came)
        holder = next(k for k, each in enumerate(came) if each.note["met"] == last)
        if any(each.note["met"] != last or each.note["new"] for each in came):
            self._bring(part, line, holder)
        if part.is_new:
            apart = {n: torch.zeros_like(x) for n, x in apart.items()}
        # New islands contribute zeros, so they do not count in the mean.
        old = sum(not each.note["new"] for each in came)
        means: dict[str, Tensor] = {}
        for dtype in sorted({self._params[n].dtype for n in part.names}, key=str):
            names = [n for n in part.names if self._params[n].dtype == dtype]
            flat = torch.cat([apart[n].reshape(-1) for n in names])
            mean = line.mean(flat, self._dtype or dtype, max(1, old))
            means |= dict(zip(names, mean.split([apart[n].numel() for n in names]), strict=True))
        return means

    def _bring(self, part: Part, line: Line, holder: int) -> None:
        """Copy the parameters of the last meeting, and the optimizer's state, to all islands.

        Args:
            part: the parameters.
            line: the connection between the islands.
            holder: the position in ``line`` of the island that sends.
        """
        for name in part.names:
            start = self._start[name]
            given = _shard(start).cpu().contiguous()
            line.from_one(given, holder)
            start.copy_(_laid_as(start, given))
        self._bring_state(part, line, holder)

    def _bring_state(self, part: Part, line: Line, holder: int) -> None:
        """Copy the state of the sending island's outer optimizer to all islands.

        For each parameter, the state consists of tensors that are laid out like the parameter or
        have one element.
        """
        for name in part.names:
            start = self._start[name]
            state = self.optimizer.state[start]
            kinds = [
                (key, x.dtype, x.ndim > 0) for key, x in state.items() if isinstance(x, Tensor)
            ]
            for key, dtype, is_laid in _sent_object(line, holder, kinds):
                mine = state.get(key)
                if mine is None:
                    mine = (
                        torch.zeros_like(start, dtype=dtype)
                        if is_laid
                        else torch.zeros((), dtype=dtype)
                    )  # noqa: E501
                given = _shard(mine).cpu().contiguous()
                line.from_one(given, holder)
                state[key] = _laid_as(mine, given) if is_laid else given


def _sent_object(line: Line, holder: int, mine: Any) -> Any:
    """Return a picklable object of the island ``holder`` on all islands.

    Args:
        line: the connection between the islands.
        holder: the position of the island that sends.
        mine: this island's value, which is sent if it is the holder.
    """
    data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    line.from_one(size, holder)
    # Every island needs a buffer of the holder's size; its content matters only on the holder.
    given = torch.zeros(int(size), dtype=torch.uint8)
    given[: len(data)] = data[: int(size)]
    line.from_one(given, holder)
    return pickle.loads(given.numpy().tobytes())


def _shard(x: Tensor) -> Tensor:
    """Return this rank's shard of ``x``, which shares its storage; empty if the rank holds none."""
    shard = plain(x) if is_global(x) else x
    return shard.detach() if not shard.is_meta else torch.empty(0, dtype=x.dtype)


def _from_first(line: Line, params: Iterable[nn.Parameter]) -> None:
    with torch.no_grad():
        for p in params:
            given = _shard(p).cpu().contiguous()
            line.from_one(given, 0)
            p.copy_(_laid_as(p, given))


def _laid_as(x: Tensor, shard: Tensor) -> Tensor:
    """Return a new tensor with the layout of ``x``, whose shard on this rank is ``shard``."""
    made = torch.zeros_like(x)
    _shard(made).copy_(shard)
    return made


def _dealt(named: Mapping[str, Tensor], parts: int) -> list[list[str]]:
    """Divide the parameters, in order, into at most ``parts`` lists of about equal size.

    Sizes are numbers of elements.
    """
    total, seen = sum(p.numel() for p in named.values()), 0
    found: list[list[str]] = [[] for _ in range(parts)]
    for name, p in named.items():
        found[min(parts - 1, seen * parts // max(1, total))].append(name)
        seen += p.numel()
    return [names for names in found if names]


def _check(named: Mapping[str, Tensor], every: int, parts: int, dtype: torch.dtype | None) -> None:
    if not named:
        raise ValueError("islands.outer: the model has no parameter that requires a gradient.")
    if every < 1:
        raise ValueError(f"islands.outer: every={every}. Give 1 step or more.")
    if not 1 <= parts <= every:
        raise ValueError(
            f"islands.outer: parts={parts} with every={every}. Each part meets at a step of its "
            f"own: give 1 to {every}."
        )
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"islands.outer: dtype={dtype}. Give a floating dtype, torch.bfloat16.")


def _described(named: Mapping[str, Any]) -> Iterator[str]:
    for name, p in named.items():
        yield f"{name} {tuple(p.shape)} {p.dtype} {p._spec if is_global(p) else 'plain'}"
