"""Recorded programs: the calls that a training step makes, noted without computing anything."""
