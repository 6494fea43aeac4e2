"""The time of one decode step of one layer, against dense attention."""
