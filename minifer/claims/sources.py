"""Who said it: the talk, papers and posts that the claims quote, each once."""

from __future__ import annotations

from minifer.claims.claim import Source

TALK = Source(
    'Dan Fu, "Inference: Turning Electricity into Intelligence", guest lecture, CS336, Stanford, '
    "June 2026",
    "https://www.youtube.com/watch?v=9EEm4iMAF5s",
)
TOGETHER_CPD = Source(
    'Together AI, "Cache-aware disaggregated inference for up to 40% faster long-context LLM '
    'serving", March 2026',
    "https://www.together.ai/blog/cache-aware-disaggregated-inference",
)
SMG_PRE_PREFILL = Source(
    "smg-project/smg, pull request 469: pre-prefill routing (the rule with its thresholds)",
    "https://github.com/smg-project/smg/pull/469",
)
SARATHI = Source(
    'Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", '
    "OSDI 2024",
    "https://arxiv.org/abs/2403.02310",
)
DISTSERVE = Source(
    'Zhong et al., "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized LLM '
    'Serving", OSDI 2024',
    "https://arxiv.org/abs/2401.09670",
)
SPLITWISE = Source(
    'Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting", '
    "ISCA 2024",
    "https://arxiv.org/abs/2311.18677",
)
MOONCAKE = Source(
    'Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025',
    "https://arxiv.org/abs/2407.00079",
)
CACHED_ATTENTION = Source(
    'Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with '
    'CachedAttention", ATC 2024',
    "https://arxiv.org/abs/2403.19708",
)
SLEATOR_TARJAN = Source(
    'Sleator and Tarjan, "Amortized Efficiency of List Update and Paging Rules", CACM 28(2), 1985',
    "https://doi.org/10.1145/2786.2793",
)
S3_FIFO = Source(
    'Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023',
    "https://doi.org/10.1145/3600006.3613147",
)
NO_BUBBLES = Source(
    'Spector et al., "Look Ma, No Bubbles! Designing a Low-Latency Megakernel for Llama-1B", '
    "Hazy Research, May 2025",
    "https://hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles",
)
RULE_OF_THREE = Source(
    'Hanley and Lippman-Hand, "If Nothing Goes Wrong, Is Everything All Right?", JAMA 249, 1983',
    "https://doi.org/10.1001/jama.1983.03330370053031",
)
ML_ENERGY = Source(
    'ML.ENERGY, "LLM Inference Energy: A Longitudinal Analysis", 2025 (Llama 3.1 8B, H100, '
    "batch 64: 0.20 and, with newer software, 0.12 J a token)",
    "https://ml.energy/blog/measurement/energy/llm-inference-energy-a-longitudinal-analysis",
)
WORDS_TO_WATTS = Source(
    'Samsi et al., "From Words to Watts", HPEC 2023 (LLaMA 65B: 3 to 4 J a token)',
    "https://arxiv.org/abs/2310.03003",
)
GEMINI_ENERGY = Source(
    'Elsworth et al., "Measuring the environmental impact of delivering AI at Google Scale", '
    "2025 (median prompt: 0.24 Wh, of which a view of the chips alone sees 0.10)",
    "https://arxiv.org/abs/2508.15734",
)
