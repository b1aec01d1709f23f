"""Pipeline parallelism: stages of a model on their own placements, under torch's schedules."""

from .pipeline import Pipeline, pipeline

__all__ = ["Pipeline", "pipeline"]
