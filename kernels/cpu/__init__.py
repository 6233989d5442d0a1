"""The megakernel of a CPU: a whole step in one call, in C++ that the reader's compiler builds.

`step.cpp` is the step, `panels.h` a matrix times a few vectors, `attention.h` attention over paged
KV, `team.h` the threads, `lanes.h` sixteen numbers at a time; `build.py` compiles them once a
machine, `pack.py` lays weights out for them, `step.py` calls them. Imports no compiler and builds
nothing by itself.
"""
