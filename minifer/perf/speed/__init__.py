"""How fast the engine is on this machine, and beside others: decode, prefill, throughput.

One rule for all engines: a speed is made of the moments at which tokens arrive (`stamps`), and of
the bytes and FLOPs that the work needs (`traffic`). `session` runs requests in this process,
`worker` and `peers` run them in others, `benchmark` takes turns.
"""
