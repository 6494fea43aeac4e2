"""Pure functions on tensors: the reference mathematics. No state, no transformers, no native code."""
