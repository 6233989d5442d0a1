"""What `laws.study` found, as Markdown: numbers and verdicts are computed from its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minifer.parcae.lab.laws.markdown import plus_minus, spread, table
from minifer.parcae.lab.laws.published import published

Data = Mapping[str, Any]
NAMES = {
    "poisson": "Poisson, per sequence",
    "poisson-batch": "Poisson, per batch",
    "constant": "constant",
}
SHOWN = (1, 2, 3, 4, 6, 8, 12, 24)  # depths in the table
SHOWN_HOPS = (0, 1, 2, 3, 5, 7, 9, 11)


def markdown(data: Data, command: str) -> str:
    """The whole report. command: what was called."""
    lines = ["# What more loops are worth", "", *_head(data, command)]
    for part, title, write in (
        ("test_time", "Loss by depth (measured here)", _test_time),
        ("depth_task", "A task that needs depth (measured here)", _depth_task),
        ("isoflop", "A budget for loops or for tokens (measured here, noisy)", _isoflop),
    ):
        if part in data:
            lines += ["", f"## {title}", "", *_call(data[part]), *write(data[part])]
    if "training" in data:
        lines += ["", *published(data["training"])]
    return "\n".join(lines) + "\n"


def _head(data: Data, command: str) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    machine, seeds = data["machine"], data["seeds"]
    lines = [
        f"By `{command}` on {data['started']}: {data['trainings']} trainings in "
        f"{data['seconds']:.0f} s ({data['cpu_seconds']:.0f} s of CPU), {machine['processes']} at "
        f"a time, on {machine['cpu']}, {machine['cores']} cores, one thread each; {versions}.",
        "",
        f"± is the standard deviation over seeds {', '.join(map(str, seeds))}. "
        "*Measured here*: tiny models on characters of Python's help topics; their forms may carry "
        "over, their numbers do not. *Reported*: by the source named. *Computed*: from what was "
        "reported, or from shapes.",
    ]
    if data["quick"]:
        lines += ["", "**Quick run: a few steps, to see that it runs. The numbers mean nothing.**"]
    return lines


def _call(part: Data) -> list[str]:
    """Of a part that was measured by a later call than the rest (`merge`)."""
    if "measured" not in part:
        return []
    call = part["measured"]
    return [
        "This part was measured anew, in the place of the one of the call above: by "
        f"`{call['command']}` on {call['started']}, "
        f"{call['trainings']} trainings in {call['seconds']:.0f} s ({call['cpu_seconds']:.0f} s of "
        f"CPU), {call['machine']['processes']} at a time, on {call['machine']['cpu']}.",
        "",
    ]


# -- loss by depth


def setting(entry: Data) -> str:
    """How a curve or group was trained, in words."""
    return f"{NAMES[entry['depth']]}, μ = {entry['mu']}"


def _test_time(part: Data) -> list[str]:
    depths, groups = part["depths"], part["groups"]
    shown = [i for i, depth in enumerate(depths) if depth in SHOWN]
    lines = [
        "A pure loop (one core layer, width 32, no prelude, no coda), trained with its depth drawn "
        "as said, run at depth T; nats a token on validation text.",
        "",
        *table(
            ["training depth", *(f"T = {depths[i]}" for i in shown), "lowest at", "L(24) − lowest"],
            [
                [
                    setting(group),
                    *(_pm(group["mean"][i], group["spread"][i], group, ".3f") for i in shown),
                    f"T = {group['best']}",
                    _pm(group["overshoot"], group["overshoot_spread"], group, ".4f"),
                ]
                for group in groups
            ],
        ),
        "",
        "Fits to each seed's curve. rmse: over all depths, nats. Beyond: largest error at T > μ of "
        "a fit on T ≤ μ. Huber: of log residuals, δ = 1e-3, × 1e-7, the published unit (there the "
        "fit minimises it, here least squares). z μ: over the seeds whose curve falls at more than "
        "its first depth.",
        "",
    ]
    forms = list(part["formulas"])
    rows = []
    for group in groups:
        own = _curves(part, group)
        for form in forms:
            fits = [curve["fits"][form] for curve in own]
            beyond = [fit["beyond"] for fit in fits if fit["beyond"] is not None]
            rows.append(
                [
                    setting(group) if form == forms[0] else "",
                    part["formulas"][form],
                    spread([fit["rmse"] for fit in fits]),
                    spread(beyond, ".3f") if beyond else "–",
                    spread([fit["huber_1e-7"] for fit in fits], ".1f"),
                    _rate(fits, group["mu"]),
                ]
            )
    headings = ["training depth", "form", "rmse", "beyond", "Huber", "z μ"]
    return [*lines, *table(headings, rows), "", *depth_findings(part)]


def _curves(part: Data, group: Data) -> list[Data]:
    """Those of a group."""
    key = (group["depth"], group["mu"])
    return [curve for curve in part["curves"] if (curve["depth"], curve["mu"]) == key]


def _rate(fits: Sequence[Data], mu: int) -> str:
    """z μ over the seeds whose curves determine it, and how many these are if not all."""
    found = [fit["z"] * mu for fit in fits if fit["determined"]]
    if not found:
        return "–"
    of = "" if len(found) == len(fits) else f" ({len(found)} of {len(fits)})"
    return spread(found, ".1f") + of


def _pm(mean: float, deviation: float, group: Data, form: str) -> str:
    return plus_minus(mean, deviation, len(group["seeds"]), form)


def depth_findings(part: Data) -> list[str]:
    """What the curves say, whatever it is: one line each."""
    forms = list(part["formulas"])
    poisson = [curve for curve in part["curves"] if curve["depth"] != "constant"]
    lines = []
    for value, words in (("rmse", "fits all depths best"), ("beyond", "predicts T > μ best")):
        judged = [c for c in poisson if all(c["fits"][f][value] is not None for f in forms)]
        if judged:
            won = sum(_winner(curve, forms, value) == "exponential" for curve in judged)
            lines.append(
                f"- The exponential {words} in {won} of {len(judged)} curves trained with Poisson "
                "depths."
            )
    rates = [
        f"μ = {group['mu']}: "
        + _rate([c["fits"]["exponential"] for c in _curves(part, group)], group["mu"])
        for group in part["groups"]
        if group["depth"] == "poisson"
    ]
    if rates:
        lines.append(
            f"- z μ of the exponential, constant if T / μ sets the decay: {'; '.join(rates)}. –: "
            "no curve of it falls at more than its first depth."
        )
    for group in part["groups"]:
        limit = 2 * group["overshoot_spread"]
        past = group["overshoot"]
        if past > max(limit, 1e-3):
            verdict = "loses by looping on (more than twice its spread)"
        elif past > 1e-3:
            verdict = "loses by looping on, within the spread of its seeds"
        else:
            verdict = "stays flat"
        lines.append(
            f"- {setting(group)}: {verdict}; L(24) is "
            f"{_pm(past, group['overshoot_spread'], group, '.4f')} nats above the lowest."
        )
    return lines


def _winner(curve: Data, forms: Sequence[str], value: str) -> str:
    return min(forms, key=lambda form: curve["fits"][form][value])


# -- isoFLOP


def _isoflop(part: Data) -> list[str]:
    budgets = part["budgets"]
    mus = budgets[0]["mus"]
    seeds = {point["seed"] for point in part["points"]}
    rows = []
    for budget in budgets:
        group = {"seeds": sorted(seeds)}
        parabola = budget["parabola"]
        if parabola is None:
            vertex = "–"
        else:
            vertex = f"{parabola['best']:.2f}" if parabola["inside"] else "none inside"
        rows.append(
            [
                f"{budget['budget']:.1e}",
                *(
                    f"{_pm(mean, deviation, group, '.3f')} ({tokens:,})"
                    for mean, deviation, tokens in zip(
                        budget["mean"], budget["spread"], budget["tokens"], strict=True
                    )
                ),
                str(budget["best"]),
                vertex,
            ]
        )
    lines = [
        "The same pure loop, with as many steps as a budget pays for: nats a token at T = μ, and "
        "the tokens of the training in parentheses. μ* is the vertex of a parabola in log μ "
        "through the means. μ = 1 has a fixed depth, the others Poisson depths per sequence.",
        "",
        *table(["FLOPs", *(f"μ = {mu}" for mu in mus), "lowest μ", "μ*"], rows),
        "",
    ]
    if part["mu_exponent"] is None:
        lines.append(
            "No exponent: not every budget has a minimum inside the depths tried. Budgets this "
            "small are short of tokens, and more loops mean fewer of them."
        )
    else:
        lines.append(
            f"μ* ∝ C^{part['mu_exponent']:.2f} through {len(budgets)} budgets. Noisy: no law."
        )
    return lines


# -- the task


def _depth_task(part: Data) -> list[str]:
    depths, recipe = part["depths"], part["recipe"]
    hops = [k for k in range(len(part["solved_from"])) if k in SHOWN_HOPS]
    rows = [
        [f"T = {depth}", *(_pm(mean[k], deviation[k], part, ".2f") for k in hops)]
        for depth, mean, deviation in zip(depths, part["mean"], part["spread"], strict=True)
    ]
    return [
        "The product of a row of permutations of three things, each position one hop from its "
        "neighbour's answer. A row begins with a start symbol: without it one that begins with "
        "the same permutation twice would look like one that begins with it once, and where all "
        "of 0 hops are right only 31/36 = 0.86 of 1 hop could be.",
        "",
        f"A pure loop of one layer, width {recipe['width']}, {part['runs'][0]['steps']} steps of "
        f"{recipe['rows']} rows of {recipe['length']} permutations, Poisson depths with "
        f"μ = {recipe['mean_recurrence']}. Share of right answers by loops and hops, on new rows; "
        "guessing is right once in six.",
        "",
        *table(["loops", *(f"{k} hop{'s' * (k != 1)}" for k in hops)], rows),
        "",
        "- Solved means here: at least "
        f"{100 * part['right']:.0f}% right on average over the seeds, with that many loops and "
        "with all larger numbers tried. The threshold is a choice. Hops, and the depth from which "
        f"they are solved: {_from(part['solved_from'])}.",
        f"- With {100 * part['nearly_all']:.0f}% as the threshold: "
        f"{_from(part['nearly_all_from'])}.",
    ]


def _from(depths: Sequence[int | None]) -> str:
    """hops → depth, in words."""
    return "; ".join(f"{k}: T = {T}" if T else f"{k}: never" for k, T in enumerate(depths))
