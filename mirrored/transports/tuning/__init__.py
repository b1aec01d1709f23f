"""Chooses between two ways to carry out a collective, by a table measured once per machine."""
