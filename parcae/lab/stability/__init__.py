"""What keeps a loop stable: a forced spectral radius and a learned one, each with its bound.

`forced` has the theory and the part without training, `bounds` the bound, `sweep` the trainings.
"""
