"""Transport for ranks of several hosts: memory inside a host, messages between hosts."""

from .transport import SeveralHosts

__all__ = ["SeveralHosts"]
