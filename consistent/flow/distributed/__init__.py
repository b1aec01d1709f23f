"""Launcher of multi-process programs, under OneFlow's name."""
