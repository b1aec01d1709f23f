"""The command line, ``python -m consistent``: what this installation is, how fast it is here, and
what a script does.

```
main    parses the arguments  info   what is installed, what is slow and why (slow)
                              bench  a short table of timings on this machine
                              doctor faults of the installation, with cures (consistent/doctor;
                                     its two ranks run one_rank)
                              script runs a script under report()
process starts and ends the process group under torchrun
```
"""

from .main import main

__all__ = ["main"]
