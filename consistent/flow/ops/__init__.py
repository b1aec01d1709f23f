"""Helpers that all ops of ``consistent.flow`` share: placements, micro-batches, padding and
factories."""
