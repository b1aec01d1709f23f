"""All changes that the library makes in torch, by theme; ``install.py`` lists them."""
