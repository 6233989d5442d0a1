"""Several programs of one kernel on a CPU: any interleaving, races, deadlocks, stray accesses.

`simulate.py` runs them, one thread a program; `vector_clocks.py` finds races, `footprints.py` what
an instruction touched and should not have; `interpreter_hooks.py` is all that knows the inside of
Triton's interpreter. Nothing here knows the megakernel: `mega/watched_step.py` applies it.
"""
