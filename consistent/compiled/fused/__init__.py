"""Messages combined with the product before them, or with the ops after them, in one call of a
native kernel."""
