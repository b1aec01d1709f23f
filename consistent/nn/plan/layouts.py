"""Entries of a plan: layouts of a tensor, and redistribution (boxing) at a module's border."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...spec import B, NdSbp, Placement, Sbp, SbpLike, as_nd_sbp, as_sbp
from ...spec.nearest import suggestion

# One entry for each axis of the placement; None leaves the layout along that axis as it is.
Nd = tuple[Sbp | None, ...]
Codecs = tuple[str | None, ...]
_UNCHANGED = "-"


@dataclass(frozen=True)
class Layouts:
    """Layouts in which a parameter or buffer is stored, used, differentiated and stepped.

    Each layout (SBP) has one entry for each axis of the placement: S (sharded), B (replicated) or P
    (partial sum).

    Args:
        sbp: the layout in which the tensor is stored between uses.
        use: the layout in which forward and backward see it; by default ``sbp``.
        grad: the layout of ``.grad``; by default ``sbp``.
        step: the layout of the parameter in the optimizer's step, and of its state; by default
            ``sbp``.
        gather: for each axis, the codec with which the tensor is gathered for ``use``, or None; by
            default there is none on any axis.
        reduce: for each axis, the codec with which its gradient is reduced after ``use``, or None.
    """

    sbp: NdSbp
    use: NdSbp = ()
    grad: NdSbp = ()
    step: NdSbp = ()
    gather: Codecs | str = ()
    reduce: Codecs | str = ()

    def __post_init__(self) -> None:
        for name in LAYOUT_FIELDS:
            object.__setattr__(self, name, as_nd_sbp(getattr(self, name)) or self.sbp)
        for name in CODEC_FIELDS:
            object.__setattr__(self, name, _read_codecs(getattr(self, name)))

    @classmethod
    def like(cls, given: Any) -> Layouts:
        """Convert an SBP, or a mapping of this class's arguments, to ``Layouts``.

        For example ``S(0)``, or ``{"sbp": S(0), "use": B}``. ``Layouts`` are returned unchanged.

        Raises:
            ValueError: the mapping has an unknown key or no ``sbp``.
        """
        if isinstance(given, Layouts):
            return given
        if isinstance(given, Mapping):
            known = (*LAYOUT_FIELDS, *CODEC_FIELDS)
            unknown = [name for name in given if name not in known]
            if unknown or "sbp" not in given:
                near = suggestion(str(unknown[0]), known) if unknown else ""
                raise ValueError(
                    f"plan: {dict(given)!r} does not say how a tensor lies.{near} Give an SBP, or "
                    "sbp= and those of use=, grad=, step= that differ from it, and the codecs "
                    "gather= and reduce=."
                )
            return cls(**given)
        return cls(given)

    @property
    def is_plain(self) -> bool:
        """Return whether all four layouts are the same, and there is no codec.

        A file then has just the SBP.
        """
        return self.is_one and not self.gather and not self.reduce

    def map(self, change: Any) -> Layouts:
        """Return a copy with ``change(x)`` in place of each layout x: sbp, use, grad and step."""
        return replace(self, **{name: change(getattr(self, name)) for name in LAYOUT_FIELDS})

    @property
    def is_one(self) -> bool:
        """Return whether the four layouts are the same, so the tensor is never redistributed."""
        return self.sbp == self.use == self.grad == self.step

    def on(self, placement: Placement) -> Layouts:
        """Return a copy for ``placement``, with B and no codec along each axis that has one rank.

        S, B and P are the same on such an axis, and B needs no gather.
        """
        layouts = self.map(lambda sbp: _set_single_rank_axes(sbp, placement, B))
        for name in CODEC_FIELDS:
            if codecs := getattr(self, name):
                layouts = replace(layouts, **{name: _set_single_rank_axes(codecs, placement, None)})
        return layouts


LAYOUT_FIELDS = ("sbp", "use", "grad", "step")
CODEC_FIELDS = ("gather", "reduce")


def _read_codecs(codecs: Any) -> Codecs:
    """Return the codec of each axis from a tuple or a text: ``"(-, int8)" -> (None, "int8")``.

    ``-`` or None stands for no codec. Without any codec the result is ``()``.
    """
    if codecs is None or isinstance(codecs, str):
        codecs = str(codecs or _UNCHANGED).strip().removeprefix("(").removesuffix(")").split(",")
    names = tuple(None if e is None or e.strip() == _UNCHANGED else e.strip() for e in codecs)
    return names if any(names) else ()


def codecs_text(codecs: Codecs) -> str:
    """Return codecs as text: ``int8`` for one axis, ``(-, int8)`` for several."""
    texts = [name or _UNCHANGED for name in codecs]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _set_single_rank_axes(nd: Any, placement: Placement, entry: Sbp | None) -> Any:
    """Return ``nd`` with ``entry`` on the axes of ``placement`` that have one rank."""
    return tuple(entry if n == 1 else e for n, e in zip(placement.shape, nd, strict=True))


@dataclass(frozen=True)
class Border:
    """Layouts to which the arguments and results of a module's calls are redistributed (boxed).

    Args:
        inputs: position or keyword of an argument -> the layout in which forward gets it.
        outputs: position or key in the result -> the layout in which the caller gets it; a result
            that is a single tensor is at position 0.
    """

    inputs: Mapping[int | str, Nd] = field(default_factory=dict)
    outputs: Mapping[int | str, Nd] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs"):
            object.__setattr__(self, name, _read_layouts(getattr(self, name)))

    def __hash__(self) -> int:
        return hash((tuple(self.inputs.items()), tuple(self.outputs.items())))

    @property
    def boxes(self) -> bool:
        """Return whether the border fixes the layout of any tensor, along any axis.

        If not, it needs no hook.
        """
        layouts = [*self.inputs.values(), *self.outputs.values()]
        return any(entry is not None for nd in layouts for entry in nd)

    def on(self, placement: Placement) -> Border:
        """Return a copy without redistribution along axes of ``placement`` that have one rank."""
        sides = (self.inputs, self.outputs)
        return Border(
            *({k: _set_single_rank_axes(nd, placement, None) for k, nd in x.items()} for x in sides)
        )

    @classmethod
    def like(cls, given: Any) -> Border:
        """Convert a mapping to a ``Border``: ``{"outputs": {0: B}} -> Border(outputs={0: (B,)})``.

        Raises:
            ValueError: the mapping has another key than ``inputs`` and ``outputs``.
        """
        if isinstance(given, Border):
            return given
        unknown = sorted(map(str, set(given) - {"inputs", "outputs"}))
        if unknown:
            near = suggestion(unknown[0], ("inputs", "outputs"))
            raise ValueError(
                f"plan: {unknown} is not said of a module's border.{near} Give inputs= and "
                "outputs=, each {position or keyword: SBP}."
            )
        return cls(**given)


def _read_layouts(layouts: Any) -> dict[int | str, Nd]:
    """Return layouts by position or key: ``B -> {0: (B,)}``, since one alone is at position 0."""
    if layouts is None:
        return {}
    if not isinstance(layouts, Mapping):
        layouts = {0: layouts}
    return {key: read_nd(value) for key, value in layouts.items()}


def read_nd(value: SbpLike | Nd) -> Nd:
    """Return the layout that ``value`` stands for, axis by axis: ``"(-, S(1))" -> (None, S(1))``.

    ``-`` or None means that the layout along this axis stays as it is.
    """
    if isinstance(value, str):
        text = value.strip().removeprefix("(").removesuffix(")") if "," in value else value
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return tuple(None if part == _UNCHANGED else as_sbp(part) for part in parts)
    if isinstance(value, tuple | list):
        return tuple(None if e in (None, _UNCHANGED) else as_sbp(e) for e in value)  # type: ignore[arg-type]
    return as_nd_sbp(value)


def nd_text(nd: Nd) -> str:
    """Return a layout as text: ``S(0)``, or ``(B, S(0))``; ``-`` for an unchanged axis."""
    texts = [_UNCHANGED if entry is None else str(entry) for entry in nd]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def join_axes(parts: list[Layouts | None]) -> Layouts:
    """Join a tensor's layouts, one for each placement axis in order, into one for all axes.

    S(0) and B become ``(S(0), B)``. In ``parts`` None stands for B (replicated).
    """
    replicated = Layouts((B,))
    all_parts = [part or replicated for part in parts]
    layouts: dict[str, Any] = {
        name: sum((getattr(p, name) for p in all_parts), ()) for name in LAYOUT_FIELDS
    }
    codecs: dict[str, Any] = {
        name: sum((getattr(p, name) or (None,) * len(p.sbp) for p in all_parts), ())
        for name in CODEC_FIELDS
    }
    return Layouts(**layouts, **codecs)


def join_borders(parts: list[Border | None]) -> Border:
    """Join a module's borders, one for each placement axis in order, into one for all axes.

    In ``parts`` None stands for an axis whose plan redistributes nothing at this module.
    """
    sides = []
    for side in ("inputs", "outputs"):
        layouts_of_parts = [getattr(part, side) if part else {} for part in parts]
        keys = dict.fromkeys(key for layouts in layouts_of_parts for key in layouts)
        sides.append(
            {k: sum((layouts.get(k, (None,)) for layouts in layouts_of_parts), ()) for k in keys}
        )
    return Border(*sides)
