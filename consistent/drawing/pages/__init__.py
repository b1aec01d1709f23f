"""Pages: one HTML file each, which loads nothing."""
