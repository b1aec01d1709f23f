"""Parser of pickles into records, which describe the objects that a pickle would create.

None of them is created. The index of ``torch.distributed.checkpoint`` is a pickle. Here its calls
are not carried out and its names are not imported. An object becomes a ``Record`` of its class,
arguments and state, and the caller takes out the fields that it knows.
"""

from __future__ import annotations

import io
import pickle
from typing import Any


class Record:
    """Description of an object that a pickle would create.

    Attributes:
        name: module and name of its class or function.
        args: arguments of the call; None if the pickle only names the class or function.
        state: the state that would be set in the object.
    """

    __slots__ = ("name", "args", "state")

    def __init__(self, name: str, args: tuple | None = None) -> None:
        self.name, self.args, self.state = name, args, None

    def field(self, name: str, *default: Any) -> Any:
        """Return the value of the attribute ``name`` of the described object.

        Attributes that have their default may be absent from a pickle: give ``default`` for these.

        Raises:
            ValueError: there is no such attribute, and no default.
        """
        state = self.state if isinstance(self.state, dict) else {}
        if name not in state and not default:
            raise ValueError(f"a {self.name} has no {name}")
        return state.get(name, *default)


def records(data: bytes) -> Any:
    """Parse a pickle of protocol 2 or later without creating the objects in it.

    The result consists of numbers, texts, tuples, lists and dictionaries, and of a ``Record`` for
    each object of any other class.

    Raises:
        ValueError: the pickle is damaged, or contains an operation that the index of a checkpoint
            does not need.
    """
    try:
        return _RecordUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a made-up pickle runs into any error of Python
        raise ValueError(str(error) or type(error).__name__) from None


_Unpickler: Any = pickle._Unpickler  # pyright: ignore  (in Python: its steps can be replaced)


class _RecordUnpickler(_Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Record(f"{module}.{name}")

    def load_call(self) -> None:
        args, function = self.stack.pop(), self.stack[-1]
        if not isinstance(function, Record) or function.args is not None or type(args) is not tuple:
            raise ValueError("it calls what is not a function")
        self.stack[-1] = Record(function.name, args)

    def load_state(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, Record) or record.args is None or record.state is not None:
            raise ValueError("it sets the state of what is not a new object")
        record.state = state

    def load_refused(self) -> None:
        raise ValueError("it has a step that no index has")

    # Opcodes of protocols 2 and later that make plain values; all others are refused.
    dispatch = dict.fromkeys(range(256), load_refused)
    for _name in (
        "PROTO FRAME MARK STOP EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS "
        "EMPTY_DICT SETITEM SETITEMS NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
        "SHORT_BINUNICODE BINUNICODE GLOBAL STACK_GLOBAL MEMOIZE BINPUT LONG_BINPUT BINGET "
        "LONG_BINGET"
    ).split():
        _step = getattr(pickle, _name)[0]
        dispatch[_step] = _Unpickler.dispatch[_step]
    dispatch |= {pickle.REDUCE[0]: load_call, pickle.NEWOBJ[0]: load_call}
    dispatch |= {pickle.BUILD[0]: load_state}
    del _name, _step
