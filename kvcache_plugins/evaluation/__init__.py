"""Measuring caches: their speed, the quality of what models read through them, and pages of the results."""
