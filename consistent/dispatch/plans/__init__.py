"""Plans as data, and helpers for the arguments, shards and gradients of a call."""
