"""Execution of boxing (redistribution) plans: collectives on shards, forward and backward."""
