"""Carrying out plans of boxing: moves become collectives on shards, forward and backward."""
