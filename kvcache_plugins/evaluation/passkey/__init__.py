"""Keys hidden in long texts, which a model is asked for: the passkey evaluation."""
