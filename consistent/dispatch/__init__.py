"""One op on global tensors: a key finds a plan, and the plan is run."""
