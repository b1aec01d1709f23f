"""Programs: what a step calls, recorded without running it."""
