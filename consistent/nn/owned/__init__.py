"""Optimizers that step whole matrices: each matrix on the one rank that owns it.

Files: ``deal`` says who owns which, ``owners`` keeps it, ``whole`` is a step, ``states`` are what
owners keep between steps, ``matrix_step`` is the function of users.
"""
