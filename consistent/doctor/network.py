"""Checks of how ranks would find each other: host name, interfaces, the port where they meet."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate

from .finding import Finding

_LOOKUP_S = 5.0
# As in mirrored/transports/torch_dist/children.py, which may not be importable here.
_LAUNCH_VARIABLES = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"


def _host_name() -> Iterator[Finding]:
    name = socket.gethostname()
    cure = (
        f"Add `127.0.0.1 {name}` to /etc/hosts (the host's own address where there are several "
        "hosts), or set GLOO_SOCKET_IFNAME to the interface between them."
    )
    try:
        addresses = sorted({str(each[4][0]) for each in _addresses(name)})
    except TooLate:
        yield Finding(
            f"looking up this host's own name, {name!r}, takes more than {_LOOKUP_S:g} s", cure
        )
        return
    except OSError as error:
        yield Finding(
            f"this host's own name, {name!r}, has no address ({error}); gloo asks for it, and "
            "ranks may not find each other",
            cure,
        )
        return
    if (
        all(address.startswith("127.") or address == "::1" for address in addresses)
        and _is_on_several_hosts()
    ):
        yield Finding(
            f"this host's own name, {name!r}, is {', '.join(addresses)}, which other hosts cannot "
            "reach, and the job has several hosts",
            cure,
        )
        return
    yield Finding(f"this host is {name}, {', '.join(addresses)}")


def _addresses(name: str) -> list:
    """Return what a host name resolves to, as ``socket.getaddrinfo`` does.

    Raises:
        TimeoutError: a name server does not answer within ``_LOOKUP_S`` seconds.
        OSError: the name has no address.
    """
    future: Future[list] = Future()

    def look_up() -> None:
        try:
            future.set_result(socket.getaddrinfo(name, None))
        except OSError as error:
            future.set_exception(error)

    # A daemon thread and no pool: a pool's thread would be waited for when this process ends.
    threading.Thread(target=look_up, daemon=True).start()
    return future.result(_LOOKUP_S)


def _is_on_several_hosts(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a rank of a job on several hosts.

    The launcher's variables tell: a job with more ranks than this host runs is on several hosts.
    """
    if not all(environ.get(name) for name in _LAUNCH_VARIABLES):
        return False
    return environ["WORLD_SIZE"] != (environ.get("LOCAL_WORLD_SIZE") or environ["WORLD_SIZE"])


def _launch_variables(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check the variables by which a launcher tells a process which rank it is."""
    settings = {name: environ[name] for name in _LAUNCH_VARIABLES if environ.get(name)}
    missing = [name for name in _LAUNCH_VARIABLES if name not in settings]
    cure = (
        "Start ranks by torchrun, which sets them all; or unset them. `unset "
        f"{' '.join(settings)}` does so for this shell."
    )
    text = ", ".join(f"{name}={value}" for name, value in settings.items())
    if missing:
        if not settings.keys().isdisjoint(("RANK", "WORLD_SIZE")):
            yield Finding(
                f"{text}: set without {', '.join(missing)}, so a process is alone, and no rank of "
                "a job",
                cure,
            )
        return
    rank, size = settings["RANK"], settings["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        yield Finding(f"{text}: this is no rank of 0 to WORLD_SIZE - 1", cure)


def _interfaces(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    interfaces = (
        [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        setting = environ.get(variable)
        if setting is None:
            continue
        # NCCL takes prefixes, and = and ^ before them.
        names = [name.strip("=^") for name in setting.split(",")]
        takes_prefixes = variable.startswith("NCCL")
        if all(
            any(t == n or (takes_prefixes and t.startswith(n)) for t in interfaces) for n in names
        ):
            yield Finding(f"{variable}={setting}")
            continue
        yield Finding(
            f"{variable}={setting}, and this host has no such interface",
            f"Name one of {', '.join(interfaces)}, or unset it.",
        )


def _rendezvous(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check MASTER_ADDR and MASTER_PORT, where the first rank of a job listens for the others.

    The address must resolve, and the port must be free before the job starts.
    """
    port = environ.get("MASTER_PORT")
    if port is None:
        yield Finding(f"ports of 127.0.0.1 can be listened at (for example {free_port()})")
        return
    host = environ.get("MASTER_ADDR", "127.0.0.1")
    cure = (
        "Set MASTER_PORT to a free one, or end the job of before; `torchrun --standalone` takes "
        "any."
    )
    if not port.isdigit() or not 0 < int(port) < 65536:
        yield Finding(f"MASTER_PORT={port} is not a port", cure)
        return
    try:
        _addresses(host)
    except (OSError, TooLate) as error:
        yield Finding(
            f"MASTER_ADDR={host} has no address ({error or 'no answer'})",
            "Set it to the name or address of the first rank's host.",
        )
        return
    if environ.get("RANK", "0") != "0" or "TORCHELASTIC_RUN_ID" in environ:
        return  # another process listens, or will
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", int(port)))
        except OSError as error:
            yield Finding(f"port {port}, where the first rank would listen: {error}", cure)
            return
    yield Finding(f"MASTER_ADDR={host}, MASTER_PORT={port}, which is free")


def free_port() -> int:
    """Return a port of 127.0.0.1 at which no process listens."""
    with socket.socket() as free:
        # Port 0: the system chooses a free one.
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


CHECKS = (_host_name, _launch_variables, _interfaces, _rendezvous)
