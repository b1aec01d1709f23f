"""The tensor that users hold."""
