"""Cost models of machines: what ops and messages cost on them."""

from .find import machine
from .machine import Machine
from .messages import Wire
from .work import Work, work_of

__all__ = ["Machine", "Wire", "Work", "machine", "work_of"]
