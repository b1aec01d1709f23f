"""What ran: ops, boxings, bytes, ops that ran whole; as text and HTML. Also why an op runs as it
does."""

from .explain import Candidate, Explained, Explanation, explain
from .report import Line, Report, report

__all__ = ["Candidate", "Explained", "Explanation", "Line", "Report", "explain", "report"]
