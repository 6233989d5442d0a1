"""A discrete-event simulator of serving, over the engine's own scheduler and KV manager."""
