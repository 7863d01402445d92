"""Wing `cpu`: what exists only because there is no GPU: layers, kernels, the decode path, stand-ins for imports."""
