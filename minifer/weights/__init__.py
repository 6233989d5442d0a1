"""Weights: from files to a filled model.

`hf` reads and writes Hugging Face directories, `loading` fills a model and checks that every
parameter was set exactly once.
"""
