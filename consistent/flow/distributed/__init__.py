"""Launching programs."""
