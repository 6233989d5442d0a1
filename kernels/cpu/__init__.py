"""The megakernel of a CPU: a whole step in one call, in C++ that the reader's compiler builds.

`step.cpp` is the step and lists the headers it is made of. `build.py` compiles it once a machine
and keeps the result, `pack.py` lays weights out in its panels, dense ones and codes as they are,
`memory.py` holds them in large pages, and `step.py` hands over the rows of a step. Importing this
runs no compiler.
"""
