"""How fast caches are: one step of attention, and whole generations."""
