"""The tensor users hold."""
