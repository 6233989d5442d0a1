"""The part of the laws' report that is reported by others, or computed from what they report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minifer.parcae.lab.laws.markdown import table

Data = Mapping[str, Any]
_FORMS = {
    "exponential": "L∞ + Z exp(−zT)",
    "shifted power": "L∞ + Z (1 + T)^−z",
    "power": "L∞ + Z T^−z",
    "no floor": "no floor",
}


def published(part: Data) -> list[str]:
    """Lines of Markdown, with headings."""
    lines = []
    for title, write in (
        ("The training law (reported)", _law),
        ("What a training token costs (computed)", _flops),
        ("Forms of the test-time law (reported)", _forms),
        ("What speaks against the headline (reported)", _against),
    ):
        lines += [f"## {title}", "", *write(part), ""]
    return lines[:-1]


def _law(part: Data) -> list[str]:
    laws = part["laws"]
    coefficients = [
        [
            size,
            *(f"{law[name]:g}" for name in ("E", "X", "x", "Y", "y")),
            f"{found['predicted']:.3f}",
            f"{found['reported']:.3f}",
            f"{100 * found['error']:+.2f}%",
        ]
        for size, law in laws.items()
        for found in (part["held_out"][size],)
    ]
    best = [
        [size, f"{float(budget) / 1e18:g}e18", str(row["table"]), f"{row['law']:.1f}"]
        for size, rows in part["best_recurrence"].items()
        for budget, row in rows.items()
    ]
    exponents = "; ".join(
        f"{size}: {row['corrected']:.2f} by the count below, {row['public_script']:.2f} by the "
        "public script's"
        for size, row in part["implied_tokens_exponent"].items()
    )
    return [
        "L(μ, D) = E + X N(μ)^−x + Y D^−y, nats a token; N(μ): parameters with the core counted μ "
        f"times, D: training tokens ({part['source']}). The last three columns: the law at μ = 8 "
        "for models it was not fitted on, against their reported loss (computed, with all "
        "parameters in N).",
        "",
        *table(["model", "E", "X", "x", "Y", "y", "law", "reported", "error"], coefficients),
        "",
        f"Reported: μ* ∝ C^{part['mu_exponent']:.2f} and D* ∝ C^{part['tokens_exponent']:.2f}. "
        "FLOPs a token are affine in μ, so the two need not sum to 1. The exponent of D that "
        f"follows from μ* and a count of FLOPs (computed) is {exponents}.",
        "",
        "The best μ of a budget as the paper's table has it (from parabolas, among 2 … 12), and "
        "where the law above is lowest at that budget (computed). They part at large budgets: do "
        "not use the law beyond the depths it was fitted on.",
        "",
        *table(["model", "FLOPs", "μ*, table", "μ*, law"], best),
    ]


def _flops(part: Data) -> list[str]:
    ratios = part["flops_ratio_8_to_1"]
    rows = []
    for size, counts in part["flops_per_token"].items():
        ratio = ratios[size]
        rows.append(
            [
                size,
                *(f"{counts[key]:.3g}" for key in ("1", "8", "1_public_script", "8_public_script")),
                *(f"{ratio[key]:.2f}" for key in ("corrected", "public_script", "hoisted")),
            ]
        )
    return [
        "FLOPs a training token, half of the loops with gradient, context 2048, attention "
        "included. Here: embedding and value-embedding tables are looked up, not multiplied; the "
        "tied head multiplies. Public script (sandyresearch/parcae@dee8363): tables counted, head "
        "left out. The last column computes B̄ e once a token, as this package does, instead of "
        "once a loop.",
        "",
        *table(
            [
                "model",
                "μ = 1",
                "μ = 8",
                "script, μ = 1",
                "script, μ = 8",
                "8 : 1",
                "script, 8 : 1",
                "B̄ e once, 8 : 1",
            ],
            rows,
        ),
    ]


def _forms(part: Data) -> list[str]:
    forms = part["forms_huber_1e-7"]
    sizes = list(next(iter(forms.values())))
    rows = [
        [_FORMS[form], *(f"{value:g}" for size in sizes for value in row[size])]
        for form, row in forms.items()
    ]
    headings = ["form", *(f"{s}, {w}" for s in sizes for w in ("all T", "T > μ"))]
    return [f"Mean Huber loss × 1e-7 ({part['source']}, appendix L).", "", *table(headings, rows)]


def _against(part: Data) -> list[str]:
    against = part["counter_evidence"]
    low, high = against["phi_interval"]
    example = against["looped_410m_at_4"]
    lines = [
        "The headline compares models of equal parameters and equal tokens:",
        "",
        *table(
            ["model", "tokens", "perplexity, plain", "perplexity, Parcae", "Core", "Core, Parcae"],
            [
                [
                    row["size"],
                    f"{row['tokens'] / 1e9:g}B",
                    f"{row['transformer_perplexity']:.2f}",
                    f"{row['parcae_perplexity']:.2f}",
                    f"{row['transformer_core']:.2f}",
                    f"{row['parcae_core']:.2f}",
                ]
                for row in part["comparisons"]
            ],
        ),
        "",
        f"- Equal compute is another question. {against['source']} fits L = E + A (N_once + r^φ "
        f"N_rec)^−α + B D^−β to 116 runs: φ = {against['phi']} (95% interval {low}–{high}; "
        f"{against['phi_truncated']} with truncated backpropagation, "
        f"{against['phi_hyper_connections']} with hyper-connections). A model of 410M looped 4 "
        f"times behaves like {example['behaves_like'] / 1e6:.0f}M and costs like 1B (computed from "
        f"φ: {example['costs_like_computed'] / 1e9:.2f}B).",
        f"- The paper's own table 6, Core at equal FLOPs: μ* loses to μ = 1 in "
        f"{len(against['rows_that_lose'])} of {len(part['isoflop_rows'])} rows, "
        + ", ".join(
            f"{row['size']} at {row['budget'] / 1e18:g}e18 "
            f"({row['looped'][0]} to {row['fixed'][0]})"
            for row in against["rows_that_lose"]
        )
        + ".",
    ]
    for evidence in against["depth_curves"]:
        values = ", ".join(f"T = {depth}: {v:g}" for depth, v in evidence["by_depth"].items())
        lines.append(
            f"- {_sentence(evidence['claim'])}. {_sentence(evidence['unit'])} at {values} "
            f"({evidence['source']})."
        )
    return lines


def _sentence(text: str) -> str:
    """With a capital at its start, and the others left."""
    return text[:1].upper() + text[1:]
