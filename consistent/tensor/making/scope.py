"""``placement_scope``: the default placement of new global tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...spec import B, Placement, SbpLike, check_placement


class _Scope(threading.local):
    placement: Placement | None = None


_scope = _Scope()


@contextmanager
def placement_scope(placement: Placement) -> Iterator[Placement]:
    """Set the default placement of factories, ``distribute`` and ``parallelize`` in the context.

    A placement that is passed to a call takes precedence. The default SBP is B (replicated). Scopes
    nest; the innermost counts.

    ```
    with placement_scope(placement("cpu", [2, 3])):
        w = consistent.randn(8, 3, sbp=S(1))
        stage = consistent.parallelize(torch.nn.Linear(8, 8))
    ```
    """
    check_placement("placement_scope", placement)
    before, _scope.placement = _scope.placement, placement
    try:
        yield placement
    finally:
        _scope.placement = before


def resolved_placement(
    what: str, placement: Placement | None, sbp: SbpLike | None
) -> tuple[Placement, SbpLike]:
    """Return the placement and SBP that the factory ``what`` uses: as passed, or the scope's.

    Raises:
        TypeError: one of them is None, and there is no default for it.
    """
    if placement is not None:
        check_placement(what, placement)
    chosen_placement = _scope.placement if placement is None else placement
    if sbp is None and chosen_placement is not None and _scope.placement is not None:
        sbp = (B,) * chosen_placement.ndim
    if chosen_placement is None or sbp is None:
        missing = [name for name, x in (("placement", placement), ("sbp", sbp)) if x is None]
        raise TypeError(
            f"{what}: {' and '.join(missing)} is missing, and a "
            f'global tensor needs both. Write {what}(..., placement=placement("cpu", ranks), '
            "sbp=S(0)), or call it inside `with placement_scope(p)`; "
            "for a plain tensor use torch's own."
        )
    return chosen_placement, sbp
