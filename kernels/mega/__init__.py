"""A whole decode step of a Llama in one persistent kernel, and everything to trust it.

Read in this order: `isa.py` what an instruction is, `schedule.py` who does what when, `verify.py`
with `coverage.py` why that can neither hang nor race nor leave anything out, `kernel.py`,
`project.py` and `ops.py` the Triton code, `launch.py` (`weights.py`, `tiles.py`) how it is started.
`reference_vm.py` is the slow twin, `mutants.py` what can go wrong, and `watched_step.py` many
programs at once on a CPU (`minifer.kernels.cosim`). What a step looks like in time is drawn by
`minifer.perf.timeline`.
"""
