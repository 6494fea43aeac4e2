"""What differs between model families: rotary layouts, key biases, layer kinds."""
