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
from typing import Any


def each_of(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Any], Any]:
    """Call the test with each of ``values`` as the argument ``names``, or as several arguments."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def every(*args: Any, **given: Any) -> None:
            cases, failed = list(values), list[tuple[Any, Exception]]()
            assert cases
            for case in cases:
                own = (
                    {names: case} if isinstance(names, str) else dict(zip(names, case, strict=True))
                )
                try:
                    test(*args, **given, **own)
                except Exception as error:  # noqa: BLE001  (all of them are listed together)
                    failed.append((case, error))
            if failed:
                texts = [f"{case}: {type(error).__name__}: {error}" for case, error in failed]
                listed = "\n\n".join(texts)
                text = f"{len(failed)} of {len(cases)} fail\n{listed}"
                raise AssertionError(text) from failed[0][1]

        taken = (names,) if isinstance(names, str) else names
        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in taken]
        every.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return every

    return decorate
