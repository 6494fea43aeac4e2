"""The time and the memory of `generate()`, each measurement in a fresh process."""
