"""Thin adapters to other libraries, one file for each. They are optional: import the file you use.

Every rank runs the library's own code as if it were the only process: one program on one logical
device. The model and batches that the library receives are global tensors (logical tensors whose
shards are on the ranks), and the metrics and files that it returns or writes are those of the
whole, unsharded tensors.
"""
