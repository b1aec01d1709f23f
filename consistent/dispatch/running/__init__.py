"""Execution of plans that need more than one call of torch."""
