"""Choice of the layouts of a whole recorded step at once, for steps where choosing op by op sends
more.

```
2nd call   recorded; each global op is noted, with what it reads       listen, chain
           one choice for each op that sends less in total             auto/layout_search (integers)
3rd call   recorded again, each op with its choice                     follow
later      the program of the two that sends less                      trial
```
"""

from .trial import Trial, use_chooser

__all__ = ["Trial", "use_chooser"]
