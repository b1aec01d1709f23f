"""Matmuls that overlap with the communication (boxing) of an operand or of the result."""
