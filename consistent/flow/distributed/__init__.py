"""Launcher of programs, under the documents' name."""
