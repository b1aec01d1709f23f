"""``python -m consistent doctor``: checks of this machine and installation, with a cure for each
fault.

```
main          prints what each check found, and gives the exit status
owners        whether one installation alone owns the package's files; `import consistent` asks, too
installation  versions, native code, compiler, packages, variables, caches
machine       cores, memory, limits, /dev/shm, the clock
network       the host's name, interfaces, the port where ranks meet
self_test     starts two ranks that run `consistent/command/one_rank.py`
```

The doctor needs Python's standard library alone. So it also runs where ``import consistent`` fails,
as a separate program: ``python .../consistent/doctor``.
"""
