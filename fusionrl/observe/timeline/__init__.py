"""`fusionrl timeline`: a run's spans as one file for Perfetto, and a report of where its time went.

records       the files of all processes, on one clock
steps         which sample was trained in which step, and the parts of its course
trace_file    the file, in the Trace Event Format, with arrows and the engines' loads
torch_traces  traces by torch.profiler, in the same file
report        shares of the time, the slowest rank, the sample that all waited for
check         whether the record can be believed (--check)
"""
