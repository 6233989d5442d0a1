"""Parcae once more, in float64 and from the equations: one sequence, plain loops, numpy.

Written from the paper and the behaviour of its public code (https://arxiv.org/abs/2604.12946,
section 4.1; sandyresearch/parcae@dee8363), not from `minifer.parcae`, with which it shares only the
published tensors' names. Keys and values lie in a dictionary:
`kv[stage, layer, slot][position] = (k, v)`; in the core a slot is an iteration, as far as the KV
policy keeps them apart. Whatever is cached, exited or shared is that dictionary and nothing else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

THETA = 50_000.0
NORM_EPS = 1e-5
QK_EPS = 2.0**-23  # torch's default for a norm of float32 numbers
GATE_CHANNELS = 32


def rms_norm(x, weight=1.0, eps=NORM_EPS):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def softplus(x):
    return np.log1p(np.exp(x))


def rotate(x, position):
    """x [heads, C]: dimensions 2i and 2i + 1 turn by position · theta^(−2i/C)."""
    out = np.empty_like(x)
    for i in range(x.shape[-1] // 2):
        angle = position * THETA ** (-2 * i / x.shape[-1])
        a, b = x[:, 2 * i], x[:, 2 * i + 1]
        out[:, 2 * i] = a * math.cos(angle) - b * math.sin(angle)
        out[:, 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def cosine(a, b):
    """At most 1; 0 where a vector has no direction."""
    length = math.sqrt(float(a @ a) * float(b @ b))
    return min(1.0, float(a @ b) / length) if length > 0 else 0.0


class Float64Parcae:
    """The weights of a model by their published names, and its head counts (H, K)."""

    def __init__(self, weights: Mapping[str, np.ndarray], heads: tuple[int, int]) -> None:
        self.w = {name: np.asarray(w, dtype=np.float64) for name, w in weights.items()}
        self.heads = heads
        self.layers = {
            stage: 1 + max((int(n.split(".")[2]) for n in self.w if f".{stage}." in n), default=-1)
            for stage in ("prelude", "core_block", "coda")
        }

    def layer_index(self, stage: str, layer: int) -> int:
        """Counted through prelude, core and coda: the number of its value embedding."""
        stages = list(self.layers)
        return sum(self.layers[s] for s in stages[: stages.index(stage)]) + layer

    # -- the linear system

    def inject(self, h, e):
        adapter = "transformer.adapter."
        if adapter + "A_log" in self.w:
            delta = softplus(self.w[adapter + "dt_bias"])
            decay = np.exp(-delta * np.exp(self.w[adapter + "A_log"]))
            return decay * h + delta * (self.w[adapter + "B"] @ e)
        if adapter + "W" in self.w:
            return self.w[adapter + "W"] @ np.concatenate([h, e])
        return h + e

    # -- the block

    def keys_values(self, stage, layer, x, token, position):
        """What a token shows to later ones: k, v [K, C]."""
        at = f"transformer.{stage}.{layer}."
        normed = rms_norm(x, self.w[at + "norm_1.weight"])
        k = (self.w[at + "attn.c_k.weight"] @ normed).reshape(self.heads[1], -1)
        v = (self.w[at + "attn.c_v.weight"] @ normed).reshape(self.heads[1], -1)
        table = f"value_embeds.{self.layer_index(stage, layer)}.weight"
        if table in self.w:
            read = self.w[at + "attn.ve_gate.weight"] @ normed[:GATE_CHANNELS]
            v = v + (2 / (1 + np.exp(-read)))[:, None] * self.w[table][token].reshape(v.shape)
        return rms_norm(rotate(k, position), eps=QK_EPS), v

    def block(self, stage, layer, x, position, seen):
        """x [D] → [D]. seen: (k, v) by position."""
        H, K = self.heads
        at = f"transformer.{stage}.{layer}."
        q = self.w[at + "attn.c_q.weight"] @ rms_norm(x, self.w[at + "norm_1.weight"])
        q = rms_norm(rotate(q.reshape(H, -1), position), eps=QK_EPS)
        heads = []
        for head in range(H):
            shared = head // (H // K)
            keys = np.stack([seen[p][0][shared] for p in range(position + 1)])
            values = np.stack([seen[p][1][shared] for p in range(position + 1)])
            scores = keys @ q[head] / math.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            heads.append(weights @ values / weights.sum())
        x = x + self.w[at + "attn.c_proj.weight"] @ np.concatenate(heads)
        hidden = self.w[at + "mlp.fc.weight"] @ rms_norm(x, self.w[at + "norm_2.weight"])
        return x + self.w[at + "mlp.proj.weight"] @ (0.5 * np.maximum(hidden, 0) ** 2)

    def forward(self, tokens: Sequence[int], num_loops: int, h0=None) -> np.ndarray:
        """Logits [T, V] of a whole sequence."""
        return Float64Decode(self, num_loops).run(tokens, h0=h0)


class Float64Decode:
    """One sequence under a KV policy, computed in as many passes as `run` is called."""

    def __init__(self, model: Float64Parcae, num_loops: int, policy: str = "full") -> None:
        self.model, self.num_loops = model, num_loops
        kind, _, kept = policy.replace("terminal", "cyclic-1").partition("-")
        self.kind, self.kept = kind, int(kept or 0)
        self.kv: dict[tuple[str, int, int], dict] = defaultdict(dict)
        self.length = 0
        self.loops: list[int] = []  # of every token
        self.changes: list[list[float]] = []  # 1 − cosine after each of its iterations
        self.states: list[list[np.ndarray]] = []  # of every token, after each iteration

    def slot(self, t: int) -> int:
        if self.kind == "full":
            return t
        return t % self.kept if self.kind == "cyclic" else min(t, self.kept - 1)

    def writes(self, t: int) -> bool:
        return self.kind != "first" or t < self.kept

    def stack(self, stage, x: dict[int, np.ndarray], tokens, slot=0, writes=True):
        """Some tokens of the pass, by position, through the layers of a stage."""
        for layer in range(self.model.layers[stage]):
            seen = self.kv[stage, layer, slot]
            if writes:
                for p in x:
                    seen[p] = self.model.keys_values(stage, layer, x[p], tokens[p], p)
            x = {p: self.model.block(stage, layer, x[p], p, seen) for p in x}
        return x

    def run(self, ids: Sequence[int], threshold=0.0, depths=None, h0=None) -> np.ndarray:
        """One pass over the next tokens → logits [n, V].

        depths: of each token, at most `num_loops`. threshold: a token also leaves after an
        iteration that has turned its state by less. h0 [n, D].
        """
        w, first = self.model.w, self.length
        own = range(first, first + len(ids))
        tokens = dict(zip(own, ids, strict=True))
        depth = dict(zip(own, depths or [self.num_loops] * len(ids), strict=True))
        e = {p: w["transformer.wte.weight"][tokens[p]] for p in own}
        e = self.stack("prelude", e, tokens)
        if "transformer.ln_prelude.weight" in w:
            e = {p: rms_norm(e[p], w["transformer.ln_prelude.weight"]) for p in own}
        h = {p: np.zeros_like(e[p]) if h0 is None else np.asarray(h0[p - first]) for p in own}
        looping, changes = set(own), {p: [] for p in own}
        states = {p: [h[p]] for p in own}
        for t in range(self.num_loops):
            x = {p: self.model.inject(h[p], e[p]) for p in own if p in looping}
            new = self.stack("core_block", x, tokens, self.slot(t), self.writes(t))
            for p in new:
                changes[p].append(1 - cosine(h[p], new[p]))
                h[p] = new[p]
                states[p].append(new[p])
                if t + 1 == depth[p] or changes[p][-1] < threshold:
                    looping.remove(p)
                    self._stand_in(p, t)
        z = {p: w["transformer.C.weight"] @ h[p] for p in own}
        z = self.stack("coda", z, tokens)
        self.length += len(ids)
        self.loops += [len(changes[p]) for p in own]
        self.changes += changes.values()
        self.states += states.values()
        final = np.stack([rms_norm(z[p], w["transformer.ln_f.weight"]) for p in own])
        return final @ w["transformer.wte.weight"].T

    def _stand_in(self, position: int, last: int) -> None:
        """In iterations that a token does not run, others see the K/V of its last one."""
        for layer in range(self.model.layers["core_block"]):
            kept = self.kv["core_block", layer, self.slot(last)][position]
            for t in range(last + 1, self.num_loops):
                if self.writes(t):
                    self.kv["core_block", layer, self.slot(t)][position] = kept
