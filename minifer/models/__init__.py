"""Models: one transformer class driven by `ModelConfig`, rotary embeddings, and the registry.

A model is written in the operations of `minifer.execution.backend.Backend` and nothing else, so
that a back end can be exchanged without the model knowing.
"""
