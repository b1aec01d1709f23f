"""Base classes of transports: one that checks calls, and one around another transport."""
