"""LongBench's scores as a metric of the package `evaluate`, loaded from this folder."""
