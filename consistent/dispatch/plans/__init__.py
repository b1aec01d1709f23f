"""Plans as data, and what all of them work on: arguments, shards and gradients."""
