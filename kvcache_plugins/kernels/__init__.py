"""Choice of the kernel that serves a layer. Native kernels register here; the torch reference always
works."""
