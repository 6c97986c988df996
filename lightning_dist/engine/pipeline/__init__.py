"""One rank of a pipeline: stages at work on a schedule's actions."""

from lightning_dist.engine.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
