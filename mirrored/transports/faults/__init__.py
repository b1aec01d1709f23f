"""Detects that a rank waits in vain, and makes all ranks raise an error that says where each is."""
