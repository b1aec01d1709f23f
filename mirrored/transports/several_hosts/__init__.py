"""Transport for ranks on several hosts: shared memory in a host, messages between hosts."""

from .transport import SeveralHosts

__all__ = ["SeveralHosts"]
