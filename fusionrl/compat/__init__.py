"""Wing `compat`: what exists only for files, flags and scripts written for other frameworks."""
