"""Scripts that run in the sandbox for the graders of programs. The grader reads them as text, and sends them along.

program.py  runs the program; it never gets an expected value
judge.py    runs a label's test, and asks the program's process for values; it never runs the program
wire.py     precedes both: the form in which values go between processes
"""
