"""Room `cluster`: Ray. Starting or joining a cluster, placement, actor groups, and the end of a run.

Elsewhere only the Buffer, the trainers and the pushes (`sync`) import ray, for calls and the object store.
"""
