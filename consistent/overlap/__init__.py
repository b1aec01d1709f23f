"""Matrix products that overlap with the boxing of their operand or of their result."""
