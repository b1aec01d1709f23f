"""`python -m consistent doctor`: what of this machine and installation is not well, and the cure.

```
main          prints what each check found, and gives the exit status
owners        whether one installation alone owns the package's files; `import consistent` asks, too
installation  versions, native code, compiler, packages, variables, caches
machine       cores, memory, limits, /dev/shm, the clock
network       the host's name, interfaces, the port where ranks meet
self_test     starts two ranks that run `consistent/command/one_rank.py`
```

It needs Python's standard library alone. So it runs where `import consistent` fails, as a program
of its own: `python .../consistent/doctor`.
"""
