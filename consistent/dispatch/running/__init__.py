"""Running a plan that is more than one call of torch."""
