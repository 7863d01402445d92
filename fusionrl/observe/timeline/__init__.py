"""`fusionrl timeline`: a run's spans as one file for Perfetto, and a report of where its time went.

records     the files of all processes, on one clock; which sample was trained in which step
trace_file  the file, in the Trace Event Format, with arrows, the engines' loads and traces by torch.profiler
report      shares of the time, the slowest rank, the sample that all waited for
command     flags, and whether the record can be believed (--check)
"""
