"""Wing `cpu`: all that a machine without a GPU needs: layers, kernels, the decode path, stand-ins for imports."""
