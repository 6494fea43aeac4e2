"""Native kernels over packed codes: their operators, how they are built, which one serves a layer.

The torch reference always works; a kernel is built at first use, never on import.
"""
