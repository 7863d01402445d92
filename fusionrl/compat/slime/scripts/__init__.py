"""Read launch scripts written for slime, in bash or Python, without running them. Pure."""
