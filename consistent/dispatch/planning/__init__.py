"""Planning: making the plan of a call whose key has no plan yet."""
