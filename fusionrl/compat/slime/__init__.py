"""slime and its fork miles, for who moves from them.

names      import names, and where each is here     api/   functions that exist only under slime's names
flags      the table of flags and of defaults       translate   a command line in fusionrl's flags
script     runs a launch script in the sandbox, with the stand-ins of inside/
arguments  what of a launch no table has            command     `fusionrl from-slime`
"""
