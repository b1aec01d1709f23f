"""Recognize lists of modules of which each is an expert, and lay each expert on one rank.

```
self.experts = nn.ModuleList(Expert() for _ in range(4))      2 ranks
rank 0: experts.0, experts.1        rank 1: experts.2, experts.3
experts.1.w1.weight [12, 8]         S(0, sizes=(12, 0))
experts.2.w1.weight [12, 8]         S(0, sizes=(0, 12))
```
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ...spec import S, Sbp, piece

EXPERTS_NAME = re.compile(r"(^|\.|_)experts?($|\.|_)", re.IGNORECASE)
"""Pattern of the names of modules that hold experts."""

# Names of functions by which a loop over experts selects the tokens of each.
_SELECTING_FUNCTIONS = frozenset("where nonzero index_add index_add_ any".split())


@dataclass(frozen=True)
class ExpertList:
    """A list of experts: modules of equal structure, of which a loop calls some for each token.

    Args:
        name: the name of the list in the whole module.
        host: the module whose forward calls them: the list itself, or the one that holds it.
        experts: the modules by their names, in order.
    """

    name: str
    host: nn.Module
    experts: dict[str, nn.Module]

    @property
    def keys(self) -> list[str]:
        """Return the names of an expert's parameters, such as ``w1.weight``.

        All experts of the list have the same.
        """
        return [key for key, _ in next(iter(self.experts.values())).named_parameters()]

    @property
    def selects(self) -> bool:
        """Return whether the forward that calls the experts seems to select tokens for each.

        This is guessed from the functions that the forward calls. Otherwise each expert may get all
        tokens, and it is better to have it on every rank.
        """
        return not _SELECTING_FUNCTIONS.isdisjoint(names_in_forward(self.host))


def names_in_forward(module: nn.Module) -> set[str]:
    """Return the names that the code of ``module``'s forward uses, as ``{"where", "experts"}``.

    Those of methods of the module that the forward calls are included. Used to guess what the
    forward does.
    """
    names, methods = set[str](), ["forward"]
    while methods:
        code = getattr(getattr(type(module), methods.pop(), None), "__code__", None)
        new = set(() if code is None else code.co_names) - names
        names |= new
        methods += [name for name in new if not hasattr(nn.Module, name)]
    return names


def expert_lists(module: nn.Module) -> Iterator[ExpertList]:
    """Return the lists (or dicts) of experts inside ``module``.

    All members of a list that have parameters are of one class, with parameters of the same names,
    shapes and dtypes, none of which is shared, and no buffers.
    """
    for name, part in module.named_modules():
        last = name.rpartition(".")[2]
        if not isinstance(part, nn.ModuleList | nn.ModuleDict) or not EXPERTS_NAME.search(last):
            continue
        if "shared" in last:  # each token uses them, so they are not routed
            continue
        children = part.named_children()
        experts = {key: each for key, each in children if any(True for _ in each.parameters())}
        if len(experts) < 2 or not _have_equal_structure(list(experts.values())):
            continue
        has_forward = type(part).forward is not nn.Module.forward
        host = part if has_forward else module.get_submodule(name.rpartition(".")[0])
        yield ExpertList(name, host, experts)


def _have_equal_structure(experts: list[nn.Module]) -> bool:
    """Return whether modules can be experts of one list, as ``expert_lists`` says."""
    shapes = [
        [(key, p.shape, p.dtype) for key, p in each.named_parameters(remove_duplicate=False)]
        for each in experts
    ]
    params = [p for each in experts for p in each.parameters()]
    return (
        len({type(each) for each in experts}) == 1
        and all(found == shapes[0] for found in shapes)
        and all(len(shape) > 0 for _, shape, _ in shapes[0])
        and 0 < len({id(p) for p in params}) == sum(map(len, shapes))
        and not any(True for each in experts for _ in each.buffers())
    )


def sbp_on_one_rank(size: int, expert: int, count: int, ranks: int) -> Sbp:
    """Return the SBP by which one rank has the whole of an expert's tensor, and the others nothing.

    Experts are assigned to ranks in balanced blocks: of 4 experts on 2 ranks, rank 0 has 0 and 1.
    So expert 1 with size 12 is ``S(0, sizes=(12, 0))``.

    Args:
        size: the size of the tensor's dim 0.
        expert: the index of the expert.
        count: the number of experts.
        ranks: the number of ranks along the axis.
    """
    runs = [piece(count, ranks, rank) for rank in range(ranks)]
    return S(0, sizes=[size * (a <= expert < a + n) for a, n in runs])
