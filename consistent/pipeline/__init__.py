"""Stages under torch's schedules: a model cut into parts that run on their own placements."""

from .pipeline import Pipeline, pipeline

__all__ = ["Pipeline", "pipeline"]
