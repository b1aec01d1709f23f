"""Reading and writing a machine as YAML that a person can edit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from reprlib import repr as short
from typing import Any

import torch

from ...cost_model.messages import Wire
from ...nn.plan import yaml_text
from ...spec.nearest import suggestion

# Every entry of a file, in order, with its unit. A file needs all entries but the optional ones.
ENTRIES = {
    "name": "",
    "device_type": "cpu or cuda",
    "ranks_per_host": "devices of a host",
    "memory_bytes": "of a device",
    "peak_flops": "flop/s of products by dtype, without sparsity",
    "memory_bytes_per_s": "bytes read + written a second, by the data sheet",
    "memory_fraction": "the fraction of it that ops reach",
    "inside": "links of ranks of one host: seconds a hop, bytes a second that a rank sends",
    "between": "links of ranks of different hosts: a rank's share of its host's network cards",
    "message_start_s": "seconds of any message beside its hops",
    "launch_seconds": "seconds of any op on the device, however small",
    "host_seconds": "seconds of Python and dispatch for each op; a GPU works meanwhile",
    "efficiency": "of products: [seconds at the peak rate, fraction of the peak rate reached]",
    "overlap": "the share of the shorter of an op's products and memory accesses that is hidden",
}
OPTIONAL = ("efficiency", "overlap")
WIRE = ("latency_s", "bytes_per_s")
NUMBERS = tuple(name for name in ENTRIES if name not in ("name", "device_type", "peak_flops"))


def to_text(machine: Any) -> str:
    """Return the machine as YAML text, with the unit above each entry."""
    lines = ["# A machine: what ops and messages cost on it."]
    for name, unit in ENTRIES.items():
        value = _yaml_value(getattr(machine, name))
        flow = None if isinstance(value, (dict, list)) else False
        entry = yaml_text.dump({name: value}, default_flow_style=flow)
        lines += [f"# {unit}"] * bool(unit) + [entry.rstrip("\n")]
    return "\n".join(lines) + "\n"


def _yaml_value(value: Any) -> Any:
    if isinstance(value, Wire):
        return {"latency_s": value.latency_s, "bytes_per_s": value.bytes_per_s}
    if isinstance(value, Mapping):
        return {str(dtype).removeprefix("torch."): rate for dtype, rate in value.items()}
    return [list(point) for point in value] if isinstance(value, tuple) else value


def from_text(text: str, where: str) -> dict[str, Any]:
    """Parse the text of a machine's file into the arguments of ``Machine``, by name.

    ``where`` is the name of the file in messages.

    Raises:
        ValueError: the text is not YAML, or an entry is missing, unknown or of the wrong kind.
    """
    entries = yaml_text.load(text, "machine", where)
    if not isinstance(entries, dict):
        raise ValueError(
            f"machine: {where} holds no entries; Machine.save(path) writes such a file."
        )
    _check_names(where, "", entries, ENTRIES, OPTIONAL)
    arguments: dict[str, Any] = {
        "name": str(entries["name"]),
        "device_type": entries["device_type"],
    }
    arguments["peak_flops"] = _rates(where, entries["peak_flops"])
    for name in NUMBERS:
        if name in ("inside", "between"):
            arguments[name] = _wire(where, name, entries[name])
        elif name == "efficiency":
            arguments |= {name: _points(where, entries[name])} if name in entries else {}
        elif name in entries:
            arguments[name] = parse_number(where, name, entries[name])
    return arguments


def _check_names(
    where: str, parent: str, entries: Any, known: Iterable[str], optional: Iterable[str] = ()
) -> None:
    known = tuple(known)
    if not isinstance(entries, dict):
        raise ValueError(
            f"machine: in {where}, {parent} is {short(entries)}; it must have {', '.join(known)}."
        )
    of_parent = f" of {parent}" if parent else ""
    for name in entries:
        if name not in known:
            raise ValueError(
                f"machine: {where} has an unknown entry {short(name)}{of_parent}."
                f"{suggestion(str(name), known)}"
            )
    for name in known:
        if name not in optional and entries.get(name) is None:
            raise ValueError(f"machine: {where} lacks the entry {short(name)}{of_parent}.")


def _wire(where: str, parent: str, entries: Any) -> Wire:
    _check_names(where, parent, entries, WIRE)
    return Wire(*(parse_number(where, f"{parent}.{name}", entries[name]) for name in WIRE))


def _rates(where: str, entries: Any) -> dict[torch.dtype, float]:
    if not isinstance(entries, dict):
        raise ValueError(
            f"machine: in {where}, peak_flops is {short(entries)}; it must name dtypes."
        )
    rates = {}
    for name, rate in entries.items():
        dtype = vars(torch).get(str(name))
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"machine: in {where}, peak_flops has {short(name)}, which is not a dtype."
            )
        rates[dtype] = parse_number(where, f"peak_flops of {name}", rate)
    return rates


def _points(where: str, pairs: Any) -> tuple[tuple[float, float], ...]:
    if not isinstance(pairs, list) or any(not isinstance(p, list) or len(p) != 2 for p in pairs):
        raise ValueError(
            f"machine: in {where}, efficiency is {short(pairs)}; "
            "it must be pairs of seconds and fractions."
        )
    a, b = (tuple(parse_number(where, "efficiency", p[i]) for p in pairs) for i in (0, 1))
    return tuple(zip(a, b))


def parse_number(where: str, name: str, value: Any) -> Any:
    """Return ``value``, an entry of a file, as a number.

    Text such as "80e9" is converted, because YAML reads 80e9, which lacks a point, as text.
    ``where`` and ``name`` are the file and the entry, for the message.

    Raises:
        ValueError: ``value`` is not a number.
    """
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"machine: in {where}, {name} is {short(value)}; it must be a number.")
    return value
