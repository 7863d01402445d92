"""Launchers written in Python, read without being run.

reader       the part of Python that they use: a small interpreter that has no access to the machine
launcher     what they call: `execute_train`, `os.environ.get`, and the commands that start a run
"""
