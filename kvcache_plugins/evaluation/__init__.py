"""Measuring caches: what every evaluation writes down, and the speed of attention and of generation."""
