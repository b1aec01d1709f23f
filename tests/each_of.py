"""One test for many small cases of a kind: it goes through all, and lists those that fail.

```
@each_of("n", [16, 11, 3])
@each_of(("src", "dst"), PAIRS)
def test_something(src, dst, n): ...
```

As ``pytest.mark.parametrize``, but the cases are one item: each item costs milliseconds of pytest's
own, which is more than such a case takes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def each(cases: Iterable[T], prove: Callable[[T], object]) -> None:
    """Run `prove` on each case, and raise with the names and errors of all that fail."""
    found = []
    for case in cases:
        try:
            prove(case)
        except Exception as error:  # noqa: BLE001  (all of them are listed together)
            found.append((case, error))
    if found:
        texts = [f"{case}: {type(error).__name__}: {error}" for case, error in found]
        raise AssertionError(f"{len(found)} fail\n" + "\n\n".join(texts)) from found[0][1]


def each_of(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Any], Any]:
    """Call the test with each of ``values`` as the argument ``names``, or as several arguments."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def every(*args: Any, **given: Any) -> None:
            cases = list(values)
            assert cases

            def one(case: Any) -> None:
                own = {names: case} if isinstance(names, str) else zip(names, case, strict=True)
                test(*args, **given, **dict(own))

            each(cases, one)

        taken = (names,) if isinstance(names, str) else names
        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in taken]
        every.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return every

    return decorate
