"""Making the plan of a call that was not met before."""
