"""One model over several processes: tensor parallelism."""
