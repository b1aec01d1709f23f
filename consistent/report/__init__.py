"""What ran: ops, boxings, bytes, ops that ran whole; as text and HTML. And why an op runs so."""

from .explain import Candidate, Explained, Explanation, explain
from .report import Line, Report, report

__all__ = ["Candidate", "Explained", "Explanation", "Line", "Report", "explain", "report"]
