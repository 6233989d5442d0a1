"""A whole decode step of a Llama in one persistent kernel, and everything to trust it.

Ordinary kernels follow each other: each begins when all programs of the one before have ended, and
while the last of them end the memory is idle. A megakernel is launched once, with one program for
each streaming multiprocessor (SM). Every program walks its own queue of instructions, slices of
the step's operations, and waits only for what its next instruction needs.

Read in this order: `isa.py` what an instruction is, `schedule.py` who does what when, `verify.py`
with `coverage.py` why that can neither hang nor race nor leave anything out, `kernel.py`,
`project.py` and `ops.py` the Triton code, `launch.py` (`shapes.py`, `weights.py`, `tiles.py`) how
it is started. `reference_vm.py` is the slow twin, `mutants.py` what can go wrong, and
`watched_step.py` many programs at once on a CPU (`minifer.kernels.cosim`). What a step looks like
in time is drawn by `minifer.perf.timeline`.

    counter         a number in memory: who has done an instruction adds to it (signal), and who
                    needs the result polls it (wait) until it has reached a target
    all-join        a wait whose target is the sum of all that is ever added: it never depends on
                    who comes first. All waits here are such
    epoch           the number of a launch since the counters were last zero. With `epochs` they are
                    never zeroed: a wait is for epoch · target
    resident        running at the same time. A program that is not yet started cannot signal, so
                    all must be resident at once: a cooperative launch, which is refused where not
                    all fit
    grid barrier    all programs wait for all: what stands between two ordinary kernels

It is made for NVIDIA GPUs; in the interpreter it is one program. Its speed is not measured yet.
"""
