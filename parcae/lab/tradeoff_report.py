"""What `tradeoff.study` found, as Markdown: every number is computed from its data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from minifer.parcae.lab.tradeoff import SCALED, TOLERATED

Data = Mapping[str, Any]
MIB = 1024**2


def markdown(data: Data, command: str) -> str:
    """The whole report. command: what was called."""
    lines = ["# What a loop model's depth, early exit and KV policies cost and save", ""]
    lines += _head(data, command)
    for title, part in (
        ("Speed against loss", _tradeoff),
        ("Depth", _depths),
        ("Early exit", _exits),
        ("KV policies", _policies),
        ("Continuous depth batching against lockstep", _batching),
        ("What the trade-offs lose", _losses),
    ):
        lines += ["", f"## {title}", "", *part(data)]
    return "\n".join(lines) + "\n"


def _head(data: Data, command: str) -> list[str]:
    plan, model, machine = data["plan"], data["model"], data["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    loop = model["loop"]
    return [
        f"Measured by `{command}` on {data['started']}: {machine['cpu']}, "
        f"{machine['cores']} cores, "
        f"{machine['threads']} thread{'s' if machine['threads'] != 1 else ''} of torch, "
        f"{machine['os']}; {versions}.",
        "",
        f"{data['name']}: {model['parameters']:,} parameters, prelude {loop['prelude']}, core "
        f"{loop['core']}, coda {loop['coda']} layers, mean depth {loop['mean_recurrence']}, "
        f"{model['dtype']}. Losses are nats a token on {plan['rows']} rows of {plan['length']} "
        "held-out tokens, read one by one through the engine from a prompt of one token (teacher "
        "forcing); ± is the standard error of the difference over rows, one model and one seed. "
        "With full depth and all KV the engine differs from whole rows without a cache by at most "
        f"{data['engine_against_dense']:.1e} nats on any token.",
        "",
        "Speeds are of the HTTP server on this machine, medians of "
        f"{plan['runs']} round{'s' if plan['runs'] != 1 else ''} in which every setting takes its "
        f"turn, and are compared with {data['tradeoff'][0]['name']} in the same round. "
        + _load(data),
    ]


def _load(data: Data) -> str:
    """How busy the machine was: with more to do than cores, even ratios are rough."""
    load, cores = data["load_average"], data["machine"]["cores"]
    if load is None:
        return "The machine does not say how busy it was."
    busy = ", more than its cores: take the speeds as rough" if load > cores else ""
    return f"Load average of the machine when they began: {load:.1f}{busy}."


def _tradeoff(data: Data) -> list[str]:
    at = data["plan"]["concurrency"]
    rows = []
    for entry in data["tradeoff"]:
        cells = [entry["name"], _loss(entry["loss"]), _excess(entry["excess"])]
        for traffic in ("single", "concurrent"):
            found = entry.get(traffic)
            cells += _speed_cells(found) if found else ["–"] * 3
        both = entry["concurrent"]
        cells += [f"{both['mean_loops']:.2f}", f"{both['core_applications']:.2f}"]
        rows.append([*cells, f"{both['steps']:.2f}"])
    heads = ["setting", "loss", "above full depth"]
    for requests in ("1 request", f"{at} requests"):
        heads += [f"tokens/s, {requests}", "ratio", "ratio by CPU time"]
    heads += [f"mean loops, {at}", "core applications a token", "steps a token"]
    return [
        *_table(heads, rows),
        "",
        "Ratio by CPU time: tokens a CPU second of client and server together, ± half the "
        "interquartile range over rounds; other programs hardly change it. Mean loops, core "
        "applications and steps are counted, not timed, with "
        f"{at} requests at a time. Mean loops are of the generated text, which is not the held-out "
        "one. `mixed` asks for 1, 4 and 8 loops in turn, so that no one loss belongs to it.",
    ]


def _depths(data: Data) -> list[str]:
    mean = data["model"]["loop"]["mean_recurrence"]
    rows = [
        [row["name"].removeprefix("depth "), *_loss_cells(row), f"{row['kv_bytes'] / 1024:g}"]
        for row in data["depths"]
    ]
    heads = ["loops", "loss", f"above {mean} loops", "same likeliest token", "KV KiB a token"]
    return _table(heads, rows)


def _exits(data: Data) -> list[str]:
    rows = []
    for entry in data["exits"]:
        engine, exact = entry["engine"], entry["exact"]
        rows.append(
            [
                f"{entry['threshold']:g}",
                f"{engine['mean_loops']:.2f}",
                *_loss_cells(engine),
                f"{exact['mean_loops']:.2f}",
                _signed(exact["excess"]),
                _difference(entry["approximation"], entry["error"]),
            ]
        )
    heads = ["threshold", "mean loops", "loss", "above full depth", "same likeliest token"]
    heads += ["exact KV: mean loops", "exact KV: above full depth", "KV approximation costs"]
    return [
        *_table(heads, rows),
        "",
        "A generated token leaves when 1 − cosine of two successive states is below the threshold. "
        "Exact KV: every token runs all loops for its keys and values, and only its answer is read "
        "where it would have left, which saves nothing and shows what the approximation costs.",
    ]


def _policies(data: Data) -> list[str]:
    rows = [
        [row["name"], f"{row['kv_bytes'] / 1024:g}", *_loss_cells(row)] for row in data["policies"]
    ]
    heads = ["policy", "KV KiB a token", "loss", "above full", "same likeliest token"]
    return [
        *_table(heads, rows),
        "",
        "KV bytes are of bfloat16; what ran here kept " + data["model"]["dtype"] + ".",
    ]


def _batching(data: Data) -> list[str]:
    rows = []
    for entry in data["batching"]:
        for kind in ("continuous", "lockstep"):
            found = entry[kind]
            rows.append(
                [
                    entry["name"],
                    kind,
                    f"{found['core_applications']:.0f}",
                    f"{found['steps']:.0f}",
                    f"{found['weight_bytes_own'] / MIB:.2f}",
                    f"{found[f'weight_bytes_{SCALED}'] / MIB:,.0f}",
                    *_batching_cells(entry, kind),
                ]
            )
    heads = ["workload", "batching", "core applications", "steps", "weight MiB a token"]
    heads += [f"the same counts at {SCALED}", "speed here", "by CPU time"]
    return [
        *_table(heads, rows),
        "",
        "Core applications and steps are counts. Weight MiB a token is modelled from them: a step "
        "reads the weights of prelude, coda and head once, an application those of the core "
        "(bfloat16).",
    ]


def _losses(data: Data) -> list[str]:
    """The honest part, in sentences."""
    mean = data["model"]["loop"]["mean_recurrence"]
    depths = {int(row["name"].removeprefix("depth ")): row for row in data["depths"]}
    shallow, deep = depths[min(depths)], depths[max(depths)]
    lines = [
        f"- **Depth.** {min(depths)} loop{'s' if min(depths) > 1 else ''} instead of {mean} costs "
        f"{_difference(shallow['excess'], shallow['error'])} nats a token."
    ]
    if max(depths) > mean:
        verdict = _verdict(deep["excess"], deep["error"])
        lines.append(
            f"- **Depth beyond training.** {max(depths)} loops against {mean}: "
            f"{_difference(deep['excess'], deep['error'])} nats a token ({verdict}), for "
            f"{max(depths) / mean:g} times the core's arithmetic and "
            f"{deep['kv_bytes'] / depths[mean]['kv_bytes']:.2f} times the KV."
        )
    lines += [_exit_sentence(data), *_policy_sentences(data), _prefix_sentence(data)]
    lines += [_batching_sentence(entry) for entry in data["batching"]]
    return lines


def _exit_sentence(data: Data) -> str:
    chosen = data["chosen_threshold"]
    entry = next(entry for entry in data["exits"] if entry["threshold"] == chosen)
    worst = max(data["exits"], key=lambda entry: entry["approximation"])
    return (
        f"- **Early exit.** The largest threshold that costs at most {TOLERATED:g} nats here is "
        f"{chosen:g}: {entry['engine']['mean_loops']:.2f} loops a token, "
        f"{_difference(entry['engine']['excess'], entry['engine']['error'])} nats, "
        f"{entry['engine']['same_top']:.1%} of the likeliest tokens unchanged. Of that, "
        f"{_difference(entry['approximation'], entry['error'])} is the approximation of keys and "
        "values that exited tokens never made "
        f"({_verdict(entry['approximation'], entry['error'])}); at most, at threshold "
        f"{worst['threshold']:g}, it is {_difference(worst['approximation'], worst['error'])}. A "
        "cosine of the state does not ask the head, so it can be fooled: the loss says by how much."
    )


def _policy_sentences(data: Data) -> list[str]:
    full = data["policies"][0]
    lines = []
    for row in data["policies"][1:]:
        if row["name"] in ("first-1", "terminal"):
            lines.append(
                f"- **{row['name']}** keeps {row['kv_bytes'] / full['kv_bytes']:.0%} of the KV "
                f"bytes and costs {_difference(row['excess'], row['error'])} nats a token "
                f"({_verdict(row['excess'], row['error'])}); "
                f"{1 - row['same_top']:.1%} of the likeliest tokens change."
            )
    return lines


def _prefix_sentence(data: Data) -> str:
    full, terminal = data["shared_prompt"]
    times = terminal["computed_tokens"] / full["computed_tokens"]
    return (
        f"- **terminal and cyclic without a prefix cache.** {full['requests']} requests whose "
        f"prompts begin alike hold {full['prompt_tokens']:,} prompt tokens: {full['policy']} "
        f"computes {full['computed_tokens']:,} of them, {terminal['policy']} all "
        f"{terminal['computed_tokens']:,}, {times:.1f} times as many. Prompts must also fit into "
        "one step, and a preempted request computes its generated tokens again one by one."
    )


def _batching_sentence(entry: Data) -> str:
    more, less = entry["continuous"], entry["lockstep"]
    core = more["core_applications"] / less["core_applications"]
    steps = more["steps"] / less["steps"]
    own = more["weight_bytes_own"] / less["weight_bytes_own"]
    large = more[f"weight_bytes_{SCALED}"] / less[f"weight_bytes_{SCALED}"]
    return (
        f"- **Continuous depth batching, {entry['name']}.** It applies the core {core:.2f} times "
        f"as often as lockstep and takes {steps:.2f} times as many steps, each of which reads the "
        f"weights of prelude, coda and head again. Modelled weight bytes: {own:.2f} times "
        "lockstep's here, "
        f"{large:.2f} times with the layers of {SCALED}. Measured here: "
        f"{median(entry['second_ratios']):.2f} times lockstep's tokens/s "
        f"({_range(entry['second_ratios'])} over rounds), {median(entry['cpu_second_ratios']):.2f} "
        f"times by CPU time ({_range(entry['cpu_second_ratios'])})."
    )


# -- cells


def _speed_cells(found: Data) -> list[str]:
    spread = found["cpu_second_ratio_iqr"] / 2
    return [
        f"{found['tokens_per_second']:.1f}",
        f"{found['second_ratio']:.2f}×",
        f"{found['cpu_second_ratio']:.2f}× ± {spread:.2f}",
    ]


def _batching_cells(entry: Data, kind: str) -> list[str]:
    if kind == "lockstep":
        return ["1", "1"]
    return [f"{median(entry[key]):.2f}×" for key in ("second_ratios", "cpu_second_ratios")]


def _loss_cells(row: Data) -> list[str]:
    excess = _difference(row["excess"], row["error"])
    return [f"{row['loss']:.4f}", excess, f"{row['same_top']:.1%}"]


def _signed(value: float) -> str:
    return format(round(value, 4) + 0.0, "+.4f")  # no −0.0000


def _difference(value: float, error: float) -> str:
    return f"{_signed(value)} ± {error:.4f}"


def _verdict(value: float, error: float) -> str:
    """In words: is a difference larger than twice its standard error?"""
    if abs(value) <= 2 * error:
        return "within two standard errors of nothing"
    return f"{'worse' if value > 0 else 'better'} by more than two standard errors"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _excess(value: float | None) -> str:
    return "–" if value is None else _signed(value)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in heads[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)]
