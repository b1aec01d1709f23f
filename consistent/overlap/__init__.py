"""Matrix products that overlap with the communication (boxing) of their operand or of their
result."""
