"""Optimizers that step whole matrices, each on the one rank that owns it.

Files: ``deal`` assigns matrices to ranks, ``owners`` stores the assignment, ``whole`` runs a step,
``states`` handles optimizer state between steps, ``matrix_step`` is the function for users.
"""
