"""Shapes of the models that the book's estimates are about; weights nobody needs for that."""

from __future__ import annotations

from minifer.config import ModelConfig

# Llama 3.1 8B: https://arxiv.org/abs/2407.21783, table 3.
LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
)
# Llama 3.2 1B: https://huggingface.co/meta-llama/Llama-3.2-1B, config.json.
LLAMA_1B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
    max_position_embeddings=131_072,
)
# 6.5 million weights: the products outweigh the calls, and a lecture has the time.
SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=288,
    hidden_size=384,
    intermediate_size=1024,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=512,
)
