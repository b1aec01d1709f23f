"""Plans as data, and helpers for their arguments, shards and gradients."""
