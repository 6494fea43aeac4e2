"""Attention over packed keys and values: the torch reference, and how models reach it."""
