"""Every place where torch itself is changed, by theme: ``install.py`` lists them."""
