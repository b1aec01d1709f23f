"""HTML pages, each a single file that loads no other resources."""
