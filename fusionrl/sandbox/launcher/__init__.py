"""The process between `fusionrl.sandbox.run_python` and the code it runs; only the standard library.

`main.py` says what it does. The folder above this one is put on the path of a bare interpreter, which then imports this
package as `launcher`: importing `fusionrl.sandbox` there would cost more than the launcher itself. Imports are relative
for that reason, and `typing` is imported for the type checker alone.
"""
