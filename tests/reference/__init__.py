"""Independent oracles, written from the formulas. Nothing here imports the package under test."""
