"""What a model is and how the engine runs it: frozen values, no tensors, no torch.

`ModelConfig` describes an architecture (one dataclass for every supported family);
`EngineConfig` holds the choices a user makes. Both are checked when they are built, so that the
rest of the house can trust them.

Letters used in every docstring: B requests, T tokens this step, S context, D model width,
F MLP width, H query heads, K KV heads, C head dim, L layers, V vocabulary, P block size, N blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any, Literal

from minifer.loops import LOOP_BATCHING, LoopConfig, LoopKVPolicy

RopeKind = Literal["default", "linear", "llama3", "yarn"]
PrefixIndexName = Literal["hash", "radix"]
PolicyName = Literal["fcfs", "priority", "lpm", "sjf", "srpt", "mlfq", "vtc"]

BACKENDS = ("torch", "compiled", "triton", "megakernel")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZE = ("none", "file", "int8", "int4")
POLICIES = ("fcfs", "priority", "lpm", "sjf", "srpt", "mlfq", "vtc")
PREFIX_INDEXES = ("hash", "radix")
KV_WRITE_POLICIES = ("through", "second_touch")
KV_LOAD_POLICIES = ("auto", "always")
SPECULATIVE_METHODS = ("none", "ngram", "draft", "loops")
SPECULATIVE_ACCEPTANCE = ("same_noise", "rejection")
GUARD_ACTIONS = ("report", "stop", "off")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base frequency and how it is stretched to long contexts.

    The fields are those of a Hugging Face `rope_parameters` dictionary; `freq_factors` holds the
    C/2 divisors a GGUF file may carry in `rope_freqs.weight`.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer. A family (Llama, Qwen2, …) is a setting of these fields."""

    architecture: str  # the Hugging Face class name, e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False  # Qwen2; Llama with attention_bias
    output_bias: bool = False  # Llama with attention_bias
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3
    # One entry a layer: None attends to everything before it, w to the last w tokens.
    sliding_windows: tuple[int | None, ...] = ()
    dtype: str = "float32"  # of the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    loop: LoopConfig | None = None  # of a model whose middle layers run more than once

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*sizes, "num_kv_heads", "head_dim", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} heads "
                f"and {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ValueError(
                f"sliding_windows needs one entry a layer: {self.num_layers} layers, "
                f"{len(self.sliding_windows)} entries"
            )
        if self.loop is not None and self.loop.num_layers != self.num_layers:
            raise ValueError(
                f"num_layers must be prelude + core + coda = {self.loop.num_layers} of loop, "
                f"got {self.num_layers}"
            )

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens, None for full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    @property
    def num_kv_slots(self) -> int:
        """KV slots a token fills: (layer × iteration). A plain transformer iterates once."""
        return self.num_layers if self.loop is None else self.loop.num_kv_slots


@dataclass(frozen=True)
class EngineConfig:
    """Every choice a user makes about running a model. Names are vLLM's where vLLM has them.

    Raises `ValueError` naming parameter, value and limit.
    """

    model: str = "default"
    dtype: str = "auto"  # float32 on a CPU, the checkpoint's dtype on a GPU
    device: str = "auto"
    backend: str = "torch"
    tensor_parallel_size: int = 1  # processes, each with its part of every matrix and its heads
    distributed_timeout_seconds: float = 60.0  # of waiting for another of them, until all is lost
    # Matrices as codes, on a CPU: those of the model's own GGUF file, or made while loading. With
    # dtype="auto" the rest is then bfloat16, which torch's packed products take.
    quantize: str = "none"
    # Scheduling (stage 1)
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True  # False: whole prompts, and nobody decodes meanwhile
    max_prefill_chunk: int | None = None  # tokens one request may prefill a step; None: budget
    max_model_len: int | None = None  # None: what the model was trained for
    scheduling_policy: str = "fcfs"
    priority_ageing_steps: int | None = 1000  # steps of waiting worth one priority level
    prefill_ageing: float = 0.1  # sjf, srpt: tokens forgiven for each one computed meanwhile
    mlfq_quantum: int = 256  # tokens of the first level; each next one has twice as many
    mlfq_starvation_steps: int | None = 1000  # steps of waiting that lift a request to the first
    # KV look-up (stage 2)
    block_size: int = 16
    num_kv_blocks: int | None = None  # overrides kv_cache_bytes
    kv_cache_bytes: int | None = None  # None: min(1 GiB, 40 % of free memory) on a CPU
    enable_prefix_caching: bool = True
    prefix_index: str = "hash"
    # Tiers below the device (stage 2); both are off by default
    kv_dram_bytes: int | None = None  # memory for blocks that were evicted or may come back
    kv_disk_path: PathLike[str] | str | None = None  # folder of block files; survives a restart
    kv_disk_bytes: int = 4 * 1024**3  # the folder's size cap
    kv_write_policy: str = "through"  # second_touch: store a block when it is used again
    kv_load_policy: str = "auto"  # load where it beats recomputing; always: whenever it is there
    kv_load_timeout: float = 5.0  # seconds a request waits for its blocks from disk
    # Sampling (stage 4)
    seed: int | None = 0  # of requests that bring none; None draws one from the system
    float32_logits: bool = False  # run the LM head in float32 (bf16 flips close greedy picks)
    # Speculation (stages 3 and 4): guess tokens, let one pass judge them. Replies stay the same.
    speculative_method: str = "none"  # ngram: look back; draft: a second model; loops: fewer loops
    num_speculative_tokens: int = 4  # drafts a request may have in one step
    prompt_lookup_min: int = 2  # ngram: a guess needs as many last tokens that occurred before …
    prompt_lookup_max: int = 4  # … and looks for as many at first
    speculative_model: PathLike[str] | str | None = None  # draft: same vocabulary, cheaper
    speculative_num_loops: int | None = None  # loops: iterations of a draft; None: a quarter
    speculative_acceptance: str = "same_noise"  # rejection: the papers' rule for temperatures > 0
    # Loop models: how often the core runs, and what it remembers
    max_num_loops: int | None = None  # what a request may ask for; None: the model's mean depth
    loop_kv_policy: str = "full"  # which iterations keep KV: full, terminal, cyclic-M, first-M
    loop_batching: str = "lockstep"  # a step ends with its deepest; patient: half; continuous: one
    # Post-processing (stage 5)
    guards: str = "report"  # what the default guards do about a reply that goes wrong
    # Everywhere: poison, guard bands, invariants after every step. Slow, and loud.
    debug: bool = False

    def __post_init__(self) -> None:
        positive = ["max_num_seqs", "max_num_batched_tokens", "block_size", "kv_disk_bytes"]
        positive += ["num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"]
        positive += ["mlfq_quantum"]
        positive.append("tensor_parallel_size")
        optional = [
            "speculative_num_loops",
            "max_prefill_chunk",
            "max_model_len",
            "priority_ageing_steps",
            "mlfq_starvation_steps",
        ]
        optional += ["num_kv_blocks", "kv_cache_bytes", "kv_dram_bytes", "max_num_loops"]
        for name in positive + optional:
            value = getattr(self, name)
            if value is None and name not in positive:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.max_model_len == 1:
            raise ValueError("max_model_len must leave room for a prompt and an answer, got 1")
        for name in ("enable_chunked_prefill", "enable_prefix_caching", "float32_logits", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.model, (str, PathLike)):
            raise ValueError(f"model must be a name or a path, got {self.model!r}")
        path, timeout = self.kv_disk_path, self.kv_load_timeout
        if path is not None and (not isinstance(path, (str, PathLike)) or not str(path)):
            raise ValueError(f"kv_disk_path must be a folder or None, got {path!r}")
        for name, value, unit in (
            ("kv_load_timeout", timeout, " seconds"),
            ("prefill_ageing", self.prefill_ageing, ""),
        ):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0{unit}, got {value!r}")
        if self.max_prefill_chunk is not None and not self.enable_chunked_prefill:
            raise ValueError(
                "max_prefill_chunk needs enable_chunked_prefill=True, got "
                f"{self.max_prefill_chunk} with False"
            )
        patience = self.distributed_timeout_seconds
        number = isinstance(patience, (int, float)) and not isinstance(patience, bool)
        if not number or not 0 < patience < math.inf:
            raise ValueError(
                f"distributed_timeout_seconds must be above 0 and finite, got {patience!r}"
            )
        if not isinstance(self.device, str):
            raise ValueError(f'device must be a string such as "cpu", got {self.device!r}')
        if self.seed is not None and type(self.seed) is not int:
            raise ValueError(f"seed must be an integer or None, got {self.seed!r}")
        for name, allowed in (
            ("backend", BACKENDS),
            ("dtype", DTYPES),
            ("quantize", QUANTIZE),
            ("scheduling_policy", POLICIES),
            ("prefix_index", PREFIX_INDEXES),
            ("kv_write_policy", KV_WRITE_POLICIES),
            ("kv_load_policy", KV_LOAD_POLICIES),
            ("speculative_method", SPECULATIVE_METHODS),
            ("speculative_acceptance", SPECULATIVE_ACCEPTANCE),
            ("guards", GUARD_ACTIONS),
            ("loop_batching", tuple(LOOP_BATCHING)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        if self.quantize != "none" and self.backend in ("triton", "megakernel"):
            raise ValueError(
                f"quantize must be none with backend={self.backend}, whose kernels read whole "
                f"numbers of bytes a weight, got {self.quantize!r}: use backend=torch"
            )
        if self.has_kv_tiers and not self.enable_prefix_caching:
            raise ValueError(
                "kv_dram_bytes and kv_disk_path need enable_prefix_caching=True, got False: a tier "
                "finds blocks by their prefix"
            )
        if LoopKVPolicy(self.loop_kv_policy).overwrites and self.enable_prefix_caching:
            raise ValueError(
                f"loop_kv_policy={self.loop_kv_policy} needs enable_prefix_caching=False: its KV "
                "is overwritten, so a prefix found is not a prefix computed"
            )
        self._check_ranks()
        self._check_speculation()

    def _check_ranks(self) -> None:
        """What several ranks of one model cannot do yet."""
        if self.tensor_parallel_size == 1:
            return
        for name, value, allowed in (
            ("backend", self.backend, ("torch", "triton")),
            ("quantize", self.quantize, ("none",)),
            ("kv_dram_bytes", self.kv_dram_bytes, (None,)),
            ("kv_disk_path", self.kv_disk_path, (None,)),
        ):
            if value not in allowed:
                raise ValueError(
                    f"{name} must be {' or '.join(map(str, allowed))} with tensor_parallel_size="
                    f"{self.tensor_parallel_size}, got {value!r}"
                )

    def _check_speculation(self) -> None:
        method = self.speculative_method
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min must be at most prompt_lookup_max ({self.prompt_lookup_max}), "
                f"got {self.prompt_lookup_min}"
            )
        for name, needed in (("speculative_model", "draft"), ("speculative_num_loops", "loops")):
            value = getattr(self, name)
            if value is not None and method != needed:
                given = value if isinstance(value, int) else str(value)
                raise ValueError(
                    f'{name} needs speculative_method="{needed}", got {given!r} with "{method}"'
                )
        model = self.speculative_model
        if method == "draft" and (not isinstance(model, (str, PathLike)) or not str(model)):
            raise ValueError(
                'speculative_method="draft" needs speculative_model, a name or a path, '
                f"got {model!r}"
            )
        if method == "draft" and self.has_kv_tiers:
            raise ValueError(
                'speculative_method="draft" keeps KV of its own, which kv_dram_bytes and '
                "kv_disk_path do not store: switch one of them off"
            )
        if method != "none" and LoopKVPolicy(self.loop_kv_policy).overwrites:
            raise ValueError(
                f'speculative_method must be "none" with loop_kv_policy={self.loop_kv_policy}, '
                f'which wants generated tokens one by one, got "{method}"'
            )

    @property
    def has_kv_tiers(self) -> bool:
        return self.kv_dram_bytes is not None or self.kv_disk_path is not None

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Build from keyword arguments; an unknown name is an error, never dropped."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(kwargs) - known)
        if unknown:
            raise ValueError(
                f"unknown engine option {unknown[0]!r}; the options are {', '.join(sorted(known))}"
            )
        return cls(**kwargs)


def with_engine_loops(model: ModelConfig, engine: EngineConfig) -> ModelConfig:
    """A model's configuration with the depth and KV slots that an engine chose for it.

    Raises `ValueError` for loop options of a model that has no loop.
    """
    if model.loop is None:
        for name in ("max_num_loops", "loop_kv_policy"):
            value = getattr(engine, name)
            if value not in (None, "full"):
                raise ValueError(
                    f"{name} needs a loop model such as parcae-tiny; this one runs each layer "
                    f"once, got {value!r}"
                )
        return model
    deepest = engine.max_num_loops or model.loop.mean_recurrence
    loop = replace(model.loop, max_num_loops=deepest, kv_policy=engine.loop_kv_policy)
    return replace(model, loop=loop)
