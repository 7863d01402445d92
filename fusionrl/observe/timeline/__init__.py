"""`fusionrl timeline`: a run's spans as one file for Perfetto, and a report of where its time went.

records       the files of all processes, on one clock
engine_log    an engine's load, from its server's log
steps         which sample was trained in which step, and the parts of its course
tracks        spans onto tracks, on which they nest
trace_file    the file, in the Trace Event Format; `flows` has its arrows, `check` the rules of the format
torch_traces  traces by torch.profiler, in the same file
report        shares of the time, the slowest rank, the sample that all waited for
"""
