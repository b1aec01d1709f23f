"""Jobs: a function of placeholders, what it is called with, what it gives back."""
