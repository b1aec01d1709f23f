"""Messages with the product before them, or the ops after them, in one call of a native kernel."""
