"""Published measurements of steps on real accelerators, as prices.

DistServe's are the coefficients of its own simulator (github.com/LLMServe/DistServe, Apache-2.0,
`simdistserve/estimators/profile_data`; Zhong et al., OSDI 2024): OPT on A100-80GB, with its
kernels and with those of the vLLM of 2024, whose OPT-66B on 2 GPUs is left out for its negative
price. Splitwise's are fitted here to its table of measurements (github.com/Mutinifni/splitwise-sim,
MIT, `data/perf_model.csv`; Patel et al., ISCA 2024). "tpN" is tensor parallel over N GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from minifer.simulation.steps.times import DecodePrices, FittedSteps, PrefillPrices

_LARGE = 95  # requests from which DistServe has a second set of decode prices

# name → prefill (fixed, token, square), decode of fewer than 95 requests (fixed, context, request),
# decode of more; milliseconds, in the order of the files.
_Three = tuple[float, float, float]
_DISTSERVE: Mapping[str, tuple[_Three, _Three, _Three]] = {
    "distserve-opt-13b-a100-tp1": (
        (18.1025, 0.101912, 7.12226e-6),
        (19.9347, 6.26936e-4, 0.0385070),
        (7.16619, 5.79800e-4, 0.158311),
    ),
    "distserve-opt-13b-a100-tp2": (
        (14.7430, 0.0685772, 2.44957e-6),
        (13.2948, 3.41092e-4, 0.0629639),
        (10.6387, 3.11834e-4, 0.0856291),
    ),
    "distserve-opt-13b-a100-tp4": (
        (12.0623, 0.0380814, 5.22625e-7),
        (10.2562, 1.87867e-4, 0.0326927),
        (10.4835, 1.71209e-4, 0.0456665),
    ),
    "distserve-opt-66b-a100-tp2": (
        (43.0588, 0.274229, 2.24780e-5),
        (48.2880, 9.42434e-4, 0.127550),
        (28.7277, 4.74485e-4, 0.296178),
    ),
    "distserve-opt-66b-a100-tp4": (
        (29.4416, 0.151352, 8.31745e-6),
        (30.7603, 4.51948e-4, 0.0632842),
        (27.4708, 4.04685e-4, 0.124807),
    ),
    "distserve-opt-66b-a100-tp8": (
        (25.4907, 0.106592, 3.39105e-6),
        (23.1551, 2.26915e-4, 0.0480064),
        (21.7177, 3.75809e-4, 0.0897861),
    ),
    "vllm2024-opt-13b-a100-tp1": (
        (22.0522, 0.140509, 8.07658e-6),
        (23.4750, 5.92934e-4, 0.0607269),
        (20.2064, 4.90773e-4, 0.120003),
    ),
    "vllm2024-opt-13b-a100-tp2": (
        (27.4408, 0.0905453, 8.45205e-6),
        (24.5406, 2.24401e-4, 0.0871579),
        (17.9478, 4.57085e-4, 0.111791),
    ),
    "vllm2024-opt-66b-a100-tp4": (
        (42.9655, 0.212866, 4.60102e-5),
        (39.5818, 6.94572e-4, 0.135809),
        (40.8597, 4.26487e-4, 0.195084),
    ),
    "vllm2024-opt-66b-a100-tp8": (
        (38.9312, 0.157368, 4.53168e-6),
        (31.1760, 2.75565e-4, 0.0679770),
        (29.0878, 6.02773e-4, 0.138961),
    ),
}


def _distserve(name: str, prefill: _Three, small: _Three, large: _Three) -> FittedSteps:
    fixed, token, square = prefill
    decode = tuple(
        (size, DecodePrices(fixed / 1e3, row / 1e3, context / 1e3))
        for size, (fixed, context, row) in ((0, small), (_LARGE, large))
    )
    source = f"DistServe's profile data, OSDI 2024: {name}"
    return FittedSteps(PrefillPrices(fixed / 1e3, token / 1e3, square / 1e3), decode, source)


# name → prefill (fixed, token, square), decode (fixed, request, context); milliseconds. Least
# squares over all rows of 1 to 64 prompts of 128 to 8,192 tokens; of the relative errors where the
# plain ones give a negative price (A100, BLOOM). Mean error 8 to 16 % of a prefill, 2 % of a
# decode step. On 2 GPUs the memory is too small for many of the rows: left out.
_SPLITWISE: Mapping[str, tuple[_Three, _Three]] = {
    "splitwise-llama2-70b-h100-tp4": ((3.923, 0.10663, 9.924e-7), (28.802, 0.28249, 9.406e-5)),
    "splitwise-llama2-70b-h100-tp8": ((5.726, 0.089922, 1.4628e-6), (29.825, 0.20773, 1.7307e-4)),
    "splitwise-llama2-70b-a100-tp4": ((14.159, 0.23686, 1.4478e-6), (43.419, 0.22425, 3.3657e-4)),
    "splitwise-llama2-70b-a100-tp8": ((21.528, 0.15024, 1.9683e-6), (44.091, 0.21108, 3.2050e-4)),
    "splitwise-bloom-176b-h100-tp8": ((17.286, 0.11918, 7.6169e-6), (35.472, 0.31701, 1.7695e-4)),
    "splitwise-bloom-176b-a100-tp8": ((30.057, 0.27692, 1.3653e-5), (47.822, 0.46509, 4.3555e-4)),
}


def _splitwise(name: str, prefill: _Three, decode: _Three) -> FittedSteps:
    return FittedSteps(
        PrefillPrices(*(x / 1e3 for x in prefill)),
        ((0, DecodePrices(*(x / 1e3 for x in decode))),),
        f"fitted to Splitwise's measurements, ISCA 2024: {name}",
    )


# Prefill of prompts of 100,000 tokens on one node; the constants of the cold/warm study's base
# case, of the order of a model with DeepSeek's attention (MLA) on four B200. Assumed, not measured.
_COLD_WARM = FittedSteps(
    PrefillPrices(0.030, 1 / 40_000, 2e-10), source="assumed: base case of cold/warm routing"
)

PUBLISHED_STEPS: Mapping[str, FittedSteps] = MappingProxyType(
    {
        **{name: _distserve(name, *prices) for name, prices in _DISTSERVE.items()},
        **{name: _splitwise(name, *prices) for name, prices in _SPLITWISE.items()},
        "cold-warm": _COLD_WARM,
    }
)

# Bytes of keys and values a token, in 16 bits: 2 · layers · KV heads · head size · 2.
_KV_BYTES: Mapping[str, int] = {
    "opt-13b": 2 * 40 * 5120 * 2,
    "opt-66b": 2 * 64 * 9216 * 2,
    "llama2-70b": 2 * 80 * 8 * 128 * 2,
    "bloom-176b": 2 * 70 * 14_336 * 2,
    "cold-warm": 70_272,  # DeepSeek-V3's latent: 61 layers of 512 + 64 numbers
}


def published_kv_bytes(name: str) -> float:
    """Bytes a token of the model that the steps `name` were measured with. Raises `ValueError` for
    a name that is not in `PUBLISHED_STEPS`."""
    if name not in PUBLISHED_STEPS:
        raise ValueError(f"steps must be one of {', '.join(PUBLISHED_STEPS)}, got {name!r}")
    return next(size for model, size in _KV_BYTES.items() if model in name)
