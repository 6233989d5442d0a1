"""What a served loop model's depth, early exit, KV policies and batching save, and what they lose.

`teacher_forcing` reads a known text through the engine, `kv_quality` compares what it makes of it;
`serving_speed` measures through the HTTP server; `study` runs everything, the rest writes it down.
"""
