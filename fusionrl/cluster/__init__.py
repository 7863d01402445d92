"""Room `cluster`: Ray. Starting or joining a cluster, placement, actor groups, and the end of a run.

The only room besides the Buffer's and the trainers' object-store calls that imports ray.
"""
