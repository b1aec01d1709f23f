"""Cost models of machines, which estimate the seconds of ops and of messages between ranks."""

from ...cost_model.messages import Wire
from ...cost_model.work import Work
from .find import machine
from .machine import Machine
from .work import work_of

__all__ = ["Machine", "Wire", "Work", "machine", "work_of"]
