"""Files that somebody made up to crash, stop or fill whoever reads them, and a child that tries."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

Write = Callable[[Path], Any]  # writes a file or folder and returns nothing

# -- safetensors ----------------------------------------------------------------------------------


def _tensors(header: Any, data: bytes = b"", length: int | None = None) -> Write:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = struct.pack("<Q", len(text) if length is None else length)
    return lambda path: path.with_suffix(".safetensors").write_bytes(size + text + data)


def _told(begin: int, end: int, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape,
            "data_offsets": [begin, end]}  # fmt: skip


SAFETENSORS: dict[str, Write] = {
    "a name twice": _tensors(
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
        b'"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}', b"1234",
    ),
    "offsets that overlap": _tensors({"a": _told(0, 3), "b": _told(2, 4)}, b"1234"),
    "one place for many": _tensors({f"x{k}": _told(0, 4096) for k in range(2000)}, bytes(4096)),
    "a hole": _tensors({"a": _told(0, 2), "b": _told(3, 4)}, b"1234"),
    "bytes left over": _tensors({"a": _told(0, 2)}, b"1234"),
    "a header of more than there is": _tensors({}, length=1 << 62),
    "a header that is a list": _tensors([1, 2]),
    "a header of lists in lists": _tensors(b"[" * 200_000),
    "tensors nested in each other": _tensors(b'{"a":' * 100_000),
    "an int of a million digits": _tensors(b'{"a": ' + b"9" * 1_000_000 + b"}"),
    "a shape of huge dims": _tensors({"a": _told(0, 0, [1 << 62] * 20_000 + [0])}),
    "a shape of many dims": _tensors({"a": _told(0, 1, [1] * 100_000)}, b"1"),
    "a shape of floats": _tensors({"a": _told(0, 2, [2.0])}, b"12"),
    "a shape of truth values": _tensors({"a": _told(0, 1, [True])}, b"1"),
    "a shape below nothing": _tensors({"a": _told(0, 2, [-1, -2])}, b"12"),
    "offsets that are texts": _tensors({"a": {**_told(0, 1), "data_offsets": "01"}}, b"1"),
    "offsets the wrong way": _tensors({"a": _told(2, 0)}, b"12"),
    "a dtype that is a list": _tensors({"a": _told(0, 2, dtype=["U8"])}, b"12"),
    "an unknown dtype": _tensors({"a": _told(0, 2, dtype="U8" * 5000)}, b"12"),
}  # fmt: skip


def _weights(text: Any) -> Write:
    def write(path: Path) -> None:
        path.mkdir()
        made = text if isinstance(text, str) else json.dumps(text)
        (path / "model.safetensors.index.json").write_text(made)

    return write


WEIGHT_MAPS: dict[str, Write] = {
    "a map that is a list": _weights([1]),
    "a map to lists": _weights({"weight_map": {"a": ["x"]}}),
    "a map out of the folder": _weights({"weight_map": {"a": "../../etc/passwd"}}),
    "a map nested in itself": _weights('{"weight_map":' * 50_000),
    "a map to no texts": _weights({"weight_map": dict.fromkeys(map(str, range(50_000)), 3)}),
    "a map with a name twice": _weights('{"weight_map": {"a": "x", "a": "y"}}'),
}

# -- our index ------------------------------------------------------------------------------------

DATA = bytes(4096)


def _index(change: dict[str, Any] | str) -> Write:
    whole = {"step": 1, "ranks": 1, "files": {"f": len(DATA)}, "kinds": {}, "values": {},
             "differing": [], "aliases": {}, "tensors": {}}  # fmt: skip

    def write(path: Path) -> None:
        path.mkdir()
        (path / "f").write_bytes(DATA)
        body = change if isinstance(change, str) else json.dumps({**whole, **change})
        head = f'{{"format": "consistent.checkpoint", "version": 1, "serial": 1, "crc32": {zlib.crc32(body.encode())}, "body": '  # noqa: E501
        (path / "checkpoint.json").write_text(head + body + "}\n")

    return write


def _tensor(shape: list[int], pieces: list[Any]) -> dict[str, Any]:
    return {"tensors": {"x": {"dtype": "uint8", "shape": shape, "pieces": pieces}}}


def _piece(start: list[int], size: list[int], at: int = 0, nbytes: int | None = None) -> list[Any]:
    nbytes = nbytes if nbytes is not None else int(torch.Size(size).numel())
    return [start, size, "f", at, nbytes, [0] * (-(-nbytes // (4 << 20)))]


def _crossed(n: int) -> list[Any]:
    """Pieces without elements whose cuts make a grid of n ** 3 cells, in text of n lines."""
    return [_piece([k, k, k], [0, n - k, n - k]) for k in range(n)]


INDEXES: dict[str, Write] = {
    "a grid of cuts": _index(_tensor([3000, 3000, 0], _crossed(3000))),
    "pieces that lie on each other": _index(
        _tensor([64, 64], [_piece([0, 0], [32, 64], 64 * k, 2048) for k in range(2)])
    ),
    "many tensors in one place": _index(
        {"tensors": {f"x{k}": {"dtype": "uint8", "shape": [4096], "pieces": [_piece([0], [4096])]}
                     for k in range(3000)}}
    ),
    "names of names": _index(
        {**_tensor([4096], [_piece([k], [1], k) for k in range(4096)]),
         "aliases": {f"y{k}": "x" for k in range(3000)}, "values": {"y0": 3}}
    ),
    "a name of a list": _index({"aliases": {"y": ["x"]}}),
    "a shape that overflows": _index(_tensor([1 << 62, 1 << 62, 0], [])),
    "a piece of many dims": _index(_tensor([4096], [_piece([0] * 70, [1] * 69 + [4096])])),
    "an offset that is a text": _index(_tensor([4], [["0", [4], "f", 0, 4, []]])),
    "too few checksums": _index(_tensor([4], [[[0], [4], "f", 0, 4, []]])),
    "a place below the file": _index(_tensor([4], [_piece([0], [4], -4)])),
    "a dtype that is a module": _index({"tensors": {"x": {"dtype": "_dynamo", "shape": [0],
                                                        "pieces": [_piece([0], [0])]}}}),
    "values in values": _index('{"values": ' + '{"a":' * 5000),
    "values that are a list": _index({"values": [1]}),
    "ranks that are many": _index({"ranks": 1 << 70, "differing": ["a"], "values": {"a": [1]}}),
    "a file out of the folder": _index({"files": {"../f": 4096}}),
    "a key twice": _index('{"step": 1, "step": 2}'),
}  # fmt: skip


# -- torch.distributed.checkpoint -----------------------------------------------------------------


def _dcp(data: bytes | Metadata | Callable[[], Any], file: bytes = b"") -> Write:
    def write(path: Path) -> None:
        path.mkdir()
        made = data() if callable(data) and not isinstance(data, Metadata) else data
        (path / ".metadata").write_bytes(made if isinstance(made, bytes) else pickle.dumps(made))
        (path / "d").write_bytes(file)

    return write


def _of(shape: list[int], chunks: list[Any], dtype: Any = torch.float32) -> TensorStorageMetadata:
    pieces = [ChunkStorageMetadata(torch.Size(a), torch.Size(n)) for a, n in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), pieces)


def _planned(path: Any) -> Metadata:
    info = {MetadataIndex("a", [0]): _StorageInfo("d", 0, 0)}
    return Metadata({"a": _of([1], [([0], [1])])}, {"a": path}, info)


def _value(length: int, times: int = 1, file: str = "d") -> Metadata:
    names = [f"a{k}" for k in range(times)]
    info = {MetadataIndex(name): _StorageInfo(file, 0, length) for name in names}
    return Metadata({name: BytesStorageMetadata() for name in names}, None, info)


def _shared_pieces() -> Metadata:
    pieces = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([0, 0]))] * 4000
    kind = TensorProperties(dtype=torch.float32)
    tensors: dict[str, Any] = {
        f"x{k}": TensorStorageMetadata(kind, torch.Size([0, k]), pieces) for k in range(4000)
    }
    return Metadata(tensors, None, {})


_CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
DCP: dict[str, Write] = {
    "a path to place 2,000,000,000": _dcp(lambda: _planned(("a", 2_000_000_000))),
    "a path of many keys": _dcp(lambda: _planned(("a",) * 100_000)),
    "a path below nothing": _dcp(lambda: _planned(("a", -1))),
    "a path that is a number": _dcp(lambda: _planned(7)),
    "state set in a class": _dcp(b"\x80\x02" + _CLASS + b"N}U\x07versionU\x04evils\x86b."),
    "state set in a module's function": _dcp(b"\x80\x02cos\ngetcwd\n}X\x01\x00\x00\x00ax\x01\x00\x00\x00bsb."),  # noqa: E501
    "a class whose attribute is set": _dcp(
        b"\x80\x02" + _CLASS + b"}X\x04\x00\x00\x00evilK\x01sb."
    ),
    "a function that is called": _dcp(b"\x80\x02cos\nabort\n)R."),
    "a file of many names": _dcp(lambda: _value(1 << 20, 3000), bytes(1 << 20)),
    "a value of a terabyte": _dcp(lambda: _value(1 << 40), b"12"),
    "a value out of the folder": _dcp(lambda: _value(2, file="../../d"), b"12"),
    "pieces that many tensors share": _dcp(_shared_pieces),
    "a tensor of a terabyte": _dcp(
        lambda: Metadata({"a": _of([1 << 38], [([0], [1 << 38])])}, None,
                         {MetadataIndex("a", [0]): _StorageInfo("d", 0, 2)}), b"12",
    ),
    "memo places far away": _dcp(b"\x80\x02Nr\xff\xff\xff\x7f."),
    "a frame of more than there is": _dcp(b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN."),
    "a bytearray of a terabyte": _dcp(b"\x80\x05\x96\x00\x00\x00\x00\x00\x01\x00\x00."),
    "lists in lists": _dcp(b"\x80\x04" + b"]" * 300_000 + b"a" * 299_999 + b"."),
    "tuples in tuples": _dcp(b"\x80\x04)" + b"\x85" * 500_000 + b"."),
    "marks alone": _dcp(b"\x80\x04" + b"(" * 500_000),
    "a text of a terabyte": _dcp(b"\x80\x04\x8d\x00\x00\x00\x00\x00\x01\x00\x00a."),
    "nothing": _dcp(b""),
    "a text": _dcp(b"(lp0\n."),
}  # fmt: skip


# -- torch.save -----------------------------------------------------------------------------------


class _Called:
    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call


def _torch(value: Any) -> Write:
    return lambda path: torch.save(value() if callable(value) else value, path.with_suffix(".pt"))


def _raw(data: bytes) -> Write:
    return lambda path: path.with_suffix(".pt").write_bytes(data)


def _packed(path: Path) -> None:
    """A file of torch.save whose storage is packed: 4 KB that become 4 MB, or any number."""
    held = io.BytesIO()
    torch.save({"x": torch.zeros(1 << 20)}, held)
    with zipfile.ZipFile(held) as old, zipfile.ZipFile(path.with_suffix(".pt"), "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def _encoded(times: int) -> bytes:
    """A pickle in which each step of nine bytes makes what there is twice as long."""
    encode = b"c_codecs\nencode\n("
    first = encode + b"X\x01\x00\x00\x00aX\x06\x00\x00\x00latin1tR"
    return (
        b"\x80\x02}X\x01\x00\x00\x00x" + encode * times + first
        + b"X\x03\x00\x00\x00hextR" * times + b"s."
    )  # fmt: skip


def _zipped(data: bytes) -> Write:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path.with_suffix(".pt"), "w") as made:
            made.writestr("a/data.pkl", data)
            made.writestr("a/byteorder", "little")
            made.writestr("a/version", "3\n")

    return write


TORCH: dict[str, Write] = {
    "a number that stands for gigabytes": _torch(lambda: {"x": torch.zeros(1).expand(1 << 30)}),
    "one storage for many": _torch(
        lambda: {f"x{k}": y[:] for y in [torch.zeros(1 << 18)] for k in range(500)}
    ),
    "a bytearray of a gigabyte": _torch(lambda: {"x": _Called(bytearray, (1 << 30,))}),
    "codecs on codecs": _zipped(_encoded(34)),
    "a packed storage": _packed,
    "a function that is called": _torch(lambda: {"x": _Called(os.mkdir, ("evil",))}),
    "lists in lists": _raw(b"\x80\x02" + b"]" * 300_000),
    "a storage of a terabyte": _torch(lambda: {"x": _Called(torch.Tensor, (1 << 38,))}),
    "a sparse tensor": _torch(lambda: {"x": torch.eye(2).to_sparse()}),
    "a tensor on no device": _torch(lambda: {"x": torch.empty(1 << 40, device="meta")}),
    "a name twice": _torch(lambda: {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}),
    "a list": _torch([1, 2]),
    "noise": _raw(bytes(range(256)) * 1000),
    "a zip of nothing": _raw(b"PK\x05\x06" + bytes(18)),
    "zeros": _raw(bytes(100_000)),
}


# -- a child that reads them ----------------------------------------------------------------------


def read_all(read: Callable[[Path], Any], paths: list[Path], most_mib: int) -> list[dict[str, Any]]:
    """What reading each of these does to a child process: what it raises, for how long it runs, by
    how many bytes it grows. A child that dies or hangs leaves the rest of the list out."""
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        os.close(told)
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + (most_mib << 20),) * 2)
            with os.fdopen(tell, "w") as out:
                for path in paths:
                    out.write(json.dumps(_read(read, path)) + "\n")
                    out.flush()
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(told) as lines:
        found = [json.loads(line) for line in lines]
    os.waitpid(child, 0)
    return found


def _read(read: Callable[[Path], Any], path: Path) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before, began, said = _peak(), time.monotonic(), None
    try:
        read(path)
    except BaseException as error:
        said = [type(error).__name__, str(error)]
    return {"said": said, "seconds": time.monotonic() - began, "grown": _peak() - before}


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
