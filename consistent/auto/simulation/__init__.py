"""A user's program followed on any number of ranks, in one process, with nothing computed or sent.

```
program --unchanged--> imagined   ops on shards whose memory is never touched
                       transport  messages that nobody gets
                       memory     what is held, and when
                  --> log of events --machine--> timeline --> report
```
"""
