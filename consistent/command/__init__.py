"""The commands of ``python -m consistent``, which examine this installation and run scripts.

```
main      parses the arguments and calls the command
info      what is installed, how ranks reach each other, and what is slow and why (slow)
doctor    faults of the installation, with cures (consistent/doctor; its two ranks run one_rank)
bench     a short table of timings on this machine
script    `explain`: runs a script under report()
verify    compares a training step under plans with one process
process   starts and ends the process group under torchrun
```
"""

from .main import main

__all__ = ["main"]
