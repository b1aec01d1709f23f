"""Thin adapters to other libraries, one file for each. They are optional: import the file you use.

Every rank runs the library's own code as if it were the only process: one program on one logical
device. What the library receives (model, batches) is global, and what it returns or writes
(metrics, files) is whole.
"""
