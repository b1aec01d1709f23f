"""Simulation of a training program on any number of ranks, in one process, without computing or
sending.

```
program --unchanged--> imagined   ops on shards whose memory is never touched
                       transport  messages that are counted, but not sent
                       memory     when memory is allocated and freed
                  --> log of events --machine--> timeline --> report
```
"""
