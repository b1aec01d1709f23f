"""All changes (monkey patches) that the library makes in torch; ``install.py`` lists them."""
