"""Room `checks`: verifies flags, files and functions before a run starts."""
