"""A whole decode step of a Llama in one persistent kernel, and everything to trust it.

Read in this order: `isa.py` what an instruction is, `schedule.py` who does what when, `verify.py`
why that can neither hang nor race, `kernel.py`, `project.py` and `ops.py` the Triton code,
`reference_vm.py` the slow twin, `cosim.py` many programs on a CPU, `timeline.py` what it looks
like, `launch.py` how it is started.
"""
