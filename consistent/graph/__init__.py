"""Recorded programs: the calls of a step, noted without running it."""
