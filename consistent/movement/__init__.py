"""Execution of boxing plans: moves become collectives on shards, forward and backward."""
