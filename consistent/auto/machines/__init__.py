"""Cost models of machines, which estimate the seconds of ops and of messages between ranks."""

from .find import machine
from .machine import Machine
from .messages import Wire
from .work import Work, work_of

__all__ = ["Machine", "Wire", "Work", "machine", "work_of"]
