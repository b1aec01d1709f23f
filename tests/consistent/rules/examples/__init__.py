"""Calls to prove each row with, a file for each family."""
