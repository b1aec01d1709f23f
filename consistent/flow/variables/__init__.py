"""Variables that jobs share by name, and their initial values."""
