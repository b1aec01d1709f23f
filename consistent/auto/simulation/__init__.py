"""Simulation of a program on any number of ranks, in one process, without computing or sending.

```
program --unchanged--> imagined   ops on shards whose memory is never touched
                       transport  messages that nobody gets
                       memory     what is held, and when
                  --> log of events --machine--> timeline --> report
```
"""
