"""Helpers of the ops of ``consistent.flow``: placements, micro-batches, padding and factories."""
