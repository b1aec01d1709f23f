"""Thin faces to other libraries, one file each. They are optional: import the file you use.

Every rank runs the library's own code as its only process would: one program on one logical
device. What it is handed (model, batches) is global, and what it hands out (metrics, files) whole.
"""
