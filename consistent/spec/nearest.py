"""Suggestions for mistyped words, to append to an error message."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# Words for an SBP, including those of DTensor, JAX and OneFlow -> how it is written here.
_WORDS = {
    "b": "B", "broadcast": "B", "r": "B", "replicate": "B", "replicated": "B", "replica": "B",
    "p": "P", "partial": "P", "partial_sum": "P", "sum": "P", "psum": "P",
    "partial_max": "P(max)", "max": "P(max)", "pmax": "P(max)",
    "partial_min": "P(min)", "min": "P(min)", "pmin": "P(min)",
    "s": "S(0)", "shard": "S(0)", "split": "S(0)", "scatter": "S(0)",
}  # fmt: skip
_DIM = re.compile(r"[a-z_]*\W*?(-?\d+)\W*")


def suggestion(name: object, known: Iterable[str], nearness: float = 0.6) -> str:
    """Return `` Did you mean 'x'?`` if a known name is near ``name``, else an empty text.

    The text is appended to an error. Upper and lower case count as the same. ``nearness`` is how
    alike the names must be, from 0 to 1, as ``difflib.get_close_matches`` counts it.
    """
    by_letters = {str(each).lower(): each for each in known}
    matches = difflib.get_close_matches(str(name).lower(), by_letters, 1, nearness)
    return f" Did you mean {by_letters[matches[0]]!r}?" if matches else ""


def nearest_sbp(text: str) -> str | None:
    """Return the SBP that a mistyped ``text`` probably means: ``"Shard(dim=1)"`` -> ``"S(1)"``.

    None if there is no such SBP.
    """
    low = text.strip().lower()
    dim = _DIM.fullmatch(re.sub("dim|axis", "", low))
    word = re.match(r"[a-z_]*", low)
    assert word is not None
    if dim is not None and (not word[0] or _WORDS.get(_nearest_word(word[0])) == "S(0)"):
        return f"S({dim[1]})"
    inner = re.search(r"\((\w+)", low)  # None for P(mean), which does not exist
    if inner is not None and _WORDS.get(_nearest_word(word[0])) == "P":
        return _WORDS.get(f"partial_{inner[1]}")
    return _WORDS.get(_nearest_word(word[0]))


def _nearest_word(word: str) -> str:
    matches = difflib.get_close_matches(word, _WORDS, 1, 0.7)
    return matches[0] if matches else ""
