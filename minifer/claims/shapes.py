"""The models that the claims speak of: shapes only."""

from __future__ import annotations

from minifer.kernels.mega.shapes import MODELS as SMALL
from minifer.simulation.steps.named import MODELS

SMOLLM2_135M = SMALL["smollm2-135m"]
LLAMA_1B = MODELS["llama-1b"]
LLAMA_8B = MODELS["llama-8b"]
LLAMA_70B = MODELS["llama-70b"]
