"""The command line, ``python -m consistent``: what this installation is, how fast it is here, what
a script does.

```
main    reads the words       info   what is installed, what is slow and why (slow)
                              bench  a short table of this machine
                              doctor what is not well, with the cure (consistent/doctor; its
                                     two ranks run one_rank)
                              script runs a script under report()
process starts and ends the process group under torchrun
```
"""

from .main import main

__all__ = ["main"]
