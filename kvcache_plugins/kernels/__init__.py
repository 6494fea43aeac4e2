"""Choice of the kernel that serves a layer; the torch reference always works."""
