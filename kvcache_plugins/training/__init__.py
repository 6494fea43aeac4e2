"""Training of Locret's retaining heads with transformers' Trainer: data, labels, the loop, what it leaves."""
