"""The perplexity of texts that are read through caches."""
