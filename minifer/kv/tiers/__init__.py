"""Where KV goes when the device is full, and comes back from: DRAM, then disk."""
