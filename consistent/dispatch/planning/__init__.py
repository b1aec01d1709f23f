"""Planning: making the plan of a call that no cached plan serves."""
