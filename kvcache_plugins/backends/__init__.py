"""Backends, one file each: its options, its layer, its cache. They never import one another."""
