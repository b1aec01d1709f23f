"""Decides by measured timings whether a collective goes through shared memory or as messages."""
