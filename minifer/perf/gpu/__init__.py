"""What a GPU is asked, and how: bandwidth, kernels one by one, and the decode ladder.

The ladder decodes the same tokens with the same weights and KV cache from eager PyTorch to a
megakernel, one change a rung. Read in this order: `cell.py` what is decoded, `rungs.py` how each
rung does it, `climb.py` how they are compared, `ladder.py` what is kept and said of it. All of it
runs on a CPU too, where our kernels are interpreted: for correctness, without a speed.
"""
