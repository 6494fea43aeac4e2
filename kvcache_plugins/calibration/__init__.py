"""Offline calibration: what text tells about a model's keys and values, once, as an artifact."""
