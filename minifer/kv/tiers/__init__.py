"""Where KV goes when the device is full, and comes back from: DRAM, then disk.

======================  ===========================================================
`tiers.py`              what is looked up, loaded and stored, and in which order
`dram.py`               blocks in memory, least recently used first, with pins
`disk.py`               a folder of block files that several processes share
`block_file.py`         one block as a safetensors file whose every byte is checked
`transfer.py`           the two threads that read ahead and write behind
`prefetching.py`        which request waits for which blocks, and for how long
`break_even.py`         load or recompute, by measured speeds
`write_policy.py`       which blocks are worth storing
`hand_over.py`          blocks that come from another engine, until their request runs
`stats.py`              what happened, counted
`opening.py`            from an engine's options to its tiers
======================  ===========================================================
"""
