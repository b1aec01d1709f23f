"""Decides which of two ways a move takes, by a table that is measured once on a machine."""
