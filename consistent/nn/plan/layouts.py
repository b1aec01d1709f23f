"""The entries of a plan: a tensor's four layouts, and what is boxed at a module's border."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...spec import B, NdSbp, Placement, Sbp, SbpLike, as_nd_sbp, as_sbp
from ...spec.nearest import suggestion

# One entry for each axis; None leaves that axis as it is.
Nd = tuple[Sbp | None, ...]
Codecs = tuple[str | None, ...]
_KEPT = "-"


@dataclass(frozen=True)
class Layouts:
    """How a parameter or buffer lies; each layout has one SBP for each axis.

    Args:
        sbp: between uses.
        use: as forward and backward see it; without it, as ``sbp``.
        grad: of ``.grad``; without it, as ``sbp``.
        step: as the optimizer sees it, and its state; without it, as ``sbp``.
        gather: for each axis the codec by which it is gathered for ``use``, None for none; without
            it, none at all.
        reduce: for each axis the codec by which its gradient is summed from ``use``.
    """

    sbp: NdSbp
    use: NdSbp = ()
    grad: NdSbp = ()
    step: NdSbp = ()
    gather: Codecs | str = ()
    reduce: Codecs | str = ()

    def __post_init__(self) -> None:
        for name in NAMES:
            object.__setattr__(self, name, as_nd_sbp(getattr(self, name)) or self.sbp)
        for name in CODED:
            object.__setattr__(self, name, _codecs(getattr(self, name)))

    @classmethod
    def like(cls, given: Any) -> Layouts:
        """``given`` itself, an SBP, or a mapping of the four names to SBPs."""
        if isinstance(given, Layouts):
            return given
        if isinstance(given, Mapping):
            known = (*NAMES, *CODED)
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
        """Whether all four are the same, and there is no codec."""
        return self.is_one and not self.gather and not self.reduce

    def map(self, change: Any) -> Layouts:
        """``change`` applied to each of the four."""
        return replace(self, **{name: change(getattr(self, name)) for name in NAMES})

    @property
    def is_one(self) -> bool:
        """Whether the four are the same."""
        return self.sbp == self.use == self.grad == self.step

    def on(self, placement: Placement) -> Layouts:
        """How the tensor is laid out on ``placement``: B along an axis of one rank, where all SBPs
        say the same."""
        made = self.map(lambda sbp: _alone(sbp, placement, B))
        for name in CODED:
            if said := getattr(self, name):
                made = replace(made, **{name: _alone(said, placement, None)})
        return made


NAMES = ("sbp", "use", "grad", "step")
CODED = ("gather", "reduce")


def _codecs(given: Any) -> Codecs:
    """Names of codecs, one for each axis; ``-`` or None is none."""
    if given is None or isinstance(given, str):
        given = str(given or _KEPT).strip().removeprefix("(").removesuffix(")").split(",")
    names = tuple(None if e is None or e.strip() == _KEPT else e.strip() for e in given)
    return names if any(names) else ()


def codecs_text(codecs: Codecs) -> str:
    """``int8`` on one axis, ``(-, int8)`` on several."""
    texts = [name or _KEPT for name in codecs]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _alone(nd: Any, placement: Placement, entry: Sbp | None) -> Any:
    """``nd`` with ``entry`` on the axes of one rank."""
    return tuple(entry if n == 1 else e for n, e in zip(placement.shape, nd, strict=True))


@dataclass(frozen=True)
class Border:
    """What is boxed where a module is called.

    Args:
        inputs: position or keyword of an argument -> its layout when forward gets it.
        outputs: position or key in the result -> its layout when the caller gets it; a result
            that is one tensor is at position 0.
    """

    inputs: Mapping[int | str, Nd] = field(default_factory=dict)
    outputs: Mapping[int | str, Nd] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs"):
            object.__setattr__(self, name, _ways(getattr(self, name)))

    def __hash__(self) -> int:
        return hash((tuple(self.inputs.items()), tuple(self.outputs.items())))

    @property
    def boxes(self) -> bool:
        """Whether anything is boxed."""
        ways = [*self.inputs.values(), *self.outputs.values()]
        return any(entry is not None for nd in ways for entry in nd)

    def on(self, placement: Placement) -> Border:
        """What is left to be boxed on ``placement``: nothing along an axis of one rank."""
        sides = (self.inputs, self.outputs)
        return Border(*({k: _alone(nd, placement, None) for k, nd in x.items()} for x in sides))

    @classmethod
    def like(cls, given: Any) -> Border:
        """``given`` itself, or a mapping with ``inputs`` and ``outputs``."""
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


def _ways(given: Any) -> dict[int | str, Nd]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        given = {0: given}
    return {key: read_nd(value) for key, value in given.items()}


def read_nd(value: SbpLike | Nd) -> Nd:
    """An nd-sbp in which ``-`` or None leaves an axis as it is: ``(-, S(1))``."""
    if isinstance(value, str):
        text = value.strip().removeprefix("(").removesuffix(")") if "," in value else value
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return tuple(None if part == _KEPT else as_sbp(part) for part in parts)
    if isinstance(value, tuple | list):
        return tuple(None if e in (None, _KEPT) else as_sbp(e) for e in value)  # type: ignore[arg-type]
    return as_nd_sbp(value)


def nd_text(nd: Nd) -> str:
    """``S(0)`` on one axis, ``(B, S(0))`` on several; ``-`` where an axis is left as it is."""
    texts = [_KEPT if entry is None else str(entry) for entry in nd]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def join_axes(parts: list[Layouts | None]) -> Layouts:
    """The layouts of one tensor from those that each axis gives it; None is B."""
    whole = Layouts((B,))
    found = [part or whole for part in parts]
    laid: dict[str, Any] = {name: sum((getattr(p, name) for p in found), ()) for name in NAMES}
    coded: dict[str, Any] = {
        name: sum((getattr(p, name) or (None,) * len(p.sbp) for p in found), ()) for name in CODED
    }
    return Layouts(**laid, **coded)


def join_borders(parts: list[Border | None]) -> Border:
    """What is boxed at one border from what each axis says of it; None leaves it as it is."""
    sides = []
    for side in ("inputs", "outputs"):
        given = [getattr(part, side) if part else {} for part in parts]
        keys = dict.fromkeys(key for ways in given for key in ways)
        sides.append({k: sum((ways.get(k, (None,)) for ways in given), ()) for k in keys})
    return Border(*sides)
