"""Pictures of boxes, lines and text, as SVG or PNG, and their colours."""
