"""The native ops of csrc/, loaded, checked and typed."""
