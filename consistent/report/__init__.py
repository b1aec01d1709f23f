"""Reports of what ran on global tensors, and explanations of the layouts that ops choose.

A report has ops, redistributions (boxings), bytes, ops that ran on gathered (replicated) inputs,
and times, as text or as an HTML page. ``explain`` shows why an op runs as it does, and what would
avoid its boxing.

```
report     collects lines and, if requested, a timeline
  lines    one op at one place     advice    what would avoid a line's boxing
  timeline when each event began and ended   trace: the same for Perfetto
  text     the table               page      HTML, with style and script
  difference, difference_page      changes from one report to another
explain    the candidates of one call
```
"""

from .advice import Advice
from .difference import Change, Difference
from .explain import Candidate, Explained, Explanation, explain
from .lines import Line
from .report import Report, report
from .timeline import Event, Timeline

__all__ = [
    "Advice",
    "Candidate",
    "Change",
    "Difference",
    "Event",
    "Explained",
    "Explanation",
    "Line",
    "Report",
    "Timeline",
    "explain",
    "report",
]
