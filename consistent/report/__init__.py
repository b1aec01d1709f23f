"""What ran: ops, boxings, bytes, ops that ran whole, times; as text and as a page. Also why an op
runs as it does, and what would spare its boxing.

```
report     collects lines and, if asked, a timeline
  lines    one op at one place     advice    what would spare a line's boxing
  timeline when each began and ended         trace: the same for Perfetto
  text     the table               page      HTML, with style and script
  difference, difference_page      from one report to another
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
