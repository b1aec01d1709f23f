"""Pictures: boxes, lines and words at places, as SVG or PNG; and their colours."""
