"""``python -m consistent doctor``: checks this machine and installation, with cures for faults.

```
main          runs the checks, prints what each found, and returns the exit status
owners        whether the imported files belong to one installation only (`import consistent` checks
              this, too)
installation  versions, native code, compiler, packages, variables, caches
machine       cores, memory, limits, /dev/shm, the clock
network       the host's name, interfaces, the port where ranks meet
self_test     starts two ranks that run `consistent/command/one_rank.py`
```

The doctor needs Python's standard library alone. So it also runs where ``import consistent`` fails,
as a separate program: ``python .../consistent/doctor``.
"""
