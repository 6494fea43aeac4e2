"""Caches that keep the most important tokens: what is scored, what is protected, and how it is stored."""
