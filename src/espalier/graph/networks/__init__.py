"""What passes messages? Layers, their kernels, and what is asked of each kind of network."""
