"""Parts that all ops of this API share: placements, micro-batches, padding and factories."""
