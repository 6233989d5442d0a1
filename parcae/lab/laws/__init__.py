"""What more loops are worth: measured on tiny models, as reported, and what speaks against it.

`fits` has the forms of the curves; `depth_law`, `depth_task` and `isoflop` train and measure;
`training_law`, `flops` and `counter_evidence` hold what others published and what follows from it;
`study` runs everything, `merge` puts a newer part among older ones, the rest writes it down.
"""
