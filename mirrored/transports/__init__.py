"""The ways in which tensors travel between ranks; `default.py` says which one is in use."""
