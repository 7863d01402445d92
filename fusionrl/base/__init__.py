"""Room `base`: what every room may use: environments of processes, file hashes, messages between processes."""
