"""What `study` found, as Markdown: every number is computed from its data."""

from __future__ import annotations

from minifer.parcae.lab.laws.markdown import table
from minifer.parcae.lab.tradeoff.cells import Data, difference, median_and_range, signed
from minifer.parcae.lab.tradeoff.losses import sentences
from minifer.parcae.lab.tradeoff.study import SCALED

MIB = 1024**2
_KV = "KV is that of bfloat16."


def markdown(data: Data, command: str) -> str:
    """The whole report. command: what was called."""
    lines = ["# What a loop model's depth, early exit and KV policies cost and save", ""]
    lines += _head(data, command)
    for title, part in (
        ("Speed against loss", _tradeoff),
        ("Depth", _depths),
        ("Early exit", _exits),
        ("KV policies", _policies),
        ("Depth batching", _batching),
        ("What the trade-offs lose", sentences),
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
    at, first = data["plan"]["concurrency"], data["tradeoff"][0]["name"]
    rows = []
    for entry in data["tradeoff"]:
        both = entry["concurrent"]
        counts = (both[name] for name in ("mean_loops", "core_applications", "steps"))
        rows.append(
            [
                entry["name"],
                f"{entry['loss']:.4f}",
                signed(entry["excess"]),
                *_speed_cells(entry["single"]),
                *_speed_cells(both),
                *(f"{count:.2f}" for count in counts),
            ]
        )
    heads = ["setting", "loss", "above full depth"]
    for requests in ("1 request", f"{at} requests"):
        heads += [f"{requests}: tokens/s", f"÷ {first}", "by CPU time"]
    heads += ["loops a token", "core applications a token", "steps a token"]
    return [
        *table(heads, rows),
        "",
        "Every request asks for N loops (depth N), or for full depth and to leave early at a "
        "threshold (exit X); the loss is that of the held-out text. ÷ "
        f"{first}: the median ratio of tokens/s in the same round; by CPU time: of tokens a CPU "
        "second of client and server together, which other programs change less, ± half the "
        "interquartile range over rounds. The last three columns are counts with "
        f"{at} requests at a time, divided by the generated tokens: loops of the text that was "
        "generated (not the held-out one), times that the weights of the core were read, and times "
        "that those of prelude, coda and head were. Prompts are part of the last two.",
    ]


def _depths(data: Data) -> list[str]:
    mean = data["model"]["loop"]["mean_recurrence"]
    rows = [
        [row["name"].removeprefix("depth "), *_loss_cells(row), f"{row['kv_bytes'] / 1024:g}"]
        for row in data["depths"]
    ]
    heads = ["loops", "loss", f"above {mean} loops", "same likeliest token", "KV KiB a token"]
    return [
        *table(heads, rows),
        "",
        f"Every token takes this many loops; {mean} is the mean depth of training. Same likeliest "
        f"token: the share of tokens after which the model's first choice is that of {mean} loops. "
        f"{_KV}",
    ]


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
                signed(exact["excess"]),
                difference(entry["approximation"], entry["error"]),
            ]
        )
    heads = ["threshold", "mean loops", "loss", "above full depth", "same likeliest token"]
    heads += ["exact KV: mean loops", "exact KV: above full depth", "KV approximation costs"]
    return [
        *table(heads, rows),
        "",
        "A generated token leaves when 1 − cosine of two successive states is below the threshold. "
        "Exact KV: every token runs all loops for its keys and values, and only its answer is read "
        "where it would have left. That saves nothing; the loss of the engine above it is what the "
        "keys and values cost that an exited token did not make.",
    ]


def _policies(data: Data) -> list[str]:
    rows = [
        [row["name"], f"{row['kv_bytes'] / 1024:g}", *_loss_cells(row)] for row in data["policies"]
    ]
    heads = ["policy", "KV KiB a token", "loss", "above full", "same likeliest token"]
    return [
        *table(heads, rows),
        "",
        "full keeps the keys and values of every loop, first-M those of the first M; cyclic-M "
        "keeps those of M and overwrites the oldest, terminal those of the last alone. All run "
        f"{data['model']['loop']['mean_recurrence']} loops. {_KV}",
    ]


def _batching(data: Data) -> list[str]:
    rows = []
    for entry in data["batching"]:
        ratios = (median_and_range(found) for found in entry["ratios"].values())
        way, usual = entry["batching"], data["default_batching"]
        rows.append(
            [
                entry["workload"],
                f"{way} (default)" if way == usual else way,
                f"{entry['core_applications']:.0f}",
                f"{entry['steps']:.0f}",
                *(f"{found / MIB:,.2f}" for found in entry["weight_bytes"].values()),
                f"{entry['tokens_per_second']:.1f}",
                *("1" if way == "lockstep" else ratio for ratio in ratios),
            ]
        )
    heads = ["workload", "a step ends", "core applications", "steps", "weight MiB a token"]
    heads += [f"with the layers of {SCALED}", "tokens/s", "÷ lockstep", "by CPU time"]
    traffic = data["speed"]["concurrent"]["settings"]
    depths = data["plan"]["mixed"]
    return [
        *table(heads, rows),
        "",
        f"{traffic['requests']} requests of {traffic['max_tokens']} generated tokens, "
        f"{traffic['concurrency']} at a time; mixed asks for "
        f"{', '.join(map(str, depths[:-1]))} and {depths[-1]} loops in turn. A step ends with its "
        "first request that is through (continuous), when half of them are (patient) or all "
        "(lockstep). Core applications and steps are counts. Weight MiB a token is "
        "modelled from them: an application reads the weights of the core, a step those of "
        "prelude, coda and head once (bfloat16). ÷ lockstep: tokens/s against lockstep's in the "
        "same round, measured here, median and range over rounds; by CPU time: tokens a CPU "
        "second, likewise.",
        "",
        *_simulated(data),
    ]


def _simulated(data: Data) -> list[str]:
    lockstep = {e["requests"]: e for e in data["simulated"] if e["batching"] == "lockstep"}
    rows = []
    for entry in data["simulated"]:
        base = lockstep[entry["requests"]]["weight_bytes"]
        rows.append(
            [
                f"{entry['requests']}",
                entry["batching"],
                f"{entry['core_applications']:,}",
                f"{entry['steps']:,}",
                *(f"{found / base[size]:.2f}" for size, found in entry["weight_bytes"].items()),
            ]
        )
    heads = ["requests", "a step ends", "core applications", "steps", "weight bytes ÷ lockstep"]
    heads.append(f"with the layers of {SCALED}")
    return [
        *table(heads, rows),
        "",
        "The mixed workload simulated, for more requests too: the counts follow from its depths. "
        "Towards the end of a run nobody takes a free seat, and the deep requests are left; the "
        "more requests, the less that matters.",
    ]


def _speed_cells(found: Data) -> list[str]:
    clock, cpu = found["ratios"]["second"], found["ratios"]["cpu_second"]
    return [
        f"{found['tokens_per_second']:.1f}",
        f"{clock['median']:.2f}×",
        f"{cpu['median']:.2f}× ± {cpu['iqr'] / 2:.2f}",
    ]


def _loss_cells(row: Data) -> list[str]:
    excess = difference(row["excess"], row["error"])
    return [f"{row['loss']:.4f}", excess, f"{row['same_top']:.1%}"]
