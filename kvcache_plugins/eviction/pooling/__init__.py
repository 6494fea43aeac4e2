"""What becomes of evicted tokens, if they are not simply dropped: merged into others, or pooled to a few."""
