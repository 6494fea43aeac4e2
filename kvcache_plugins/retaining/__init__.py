"""Retaining heads: small networks that tell which keys and values of a prompt are worth keeping (Locret)."""
