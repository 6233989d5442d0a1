"""What each trade-off loses, in sentences: every number and verdict is computed from the data."""

from __future__ import annotations

from minifer.parcae.lab.tradeoff.cells import Data, difference, median_and_range
from minifer.parcae.lab.tradeoff.study import SCALED, TOLERATED


def sentences(data: Data) -> list[str]:
    """A list item for each trade-off."""
    mean = data["model"]["loop"]["mean_recurrence"]
    depths = {int(row["name"].removeprefix("depth ")): row for row in data["depths"]}
    shallow, deep = depths[min(depths)], depths[max(depths)]
    lines = [
        f"- **Depth.** {min(depths)} loop{'s' if min(depths) > 1 else ''} instead of {mean} costs "
        f"{difference(shallow['excess'], shallow['error'])} nats a token."
    ]
    if max(depths) > mean:
        verdict = _verdict(deep["excess"], deep["error"])
        lines.append(
            f"- **Depth beyond training.** {max(depths)} loops against {mean}: "
            f"{difference(deep['excess'], deep['error'])} nats a token ({verdict}), for "
            f"{max(depths) / mean:g} times the core's arithmetic and "
            f"{deep['kv_bytes'] / depths[mean]['kv_bytes']:.2f} times the KV."
        )
    lines += [_exit_sentence(data), *_policy_sentences(data), _prefix_sentence(data)]
    workloads = dict.fromkeys(entry["workload"] for entry in data["batching"])
    lines += [_batching_sentence(data, workload) for workload in workloads]
    return [*lines, _simulated_sentence(data)]


def _exit_sentence(data: Data) -> str:
    chosen = data["chosen_threshold"]
    entry = next(entry for entry in data["exits"] if entry["threshold"] == chosen)
    engine, worst = entry["engine"], max(data["exits"], key=lambda found: found["approximation"])
    if engine["excess"] <= TOLERATED:
        choice = f"The largest threshold that costs at most {TOLERATED:g} nats here is {chosen:g}"
    else:
        choice = f"No threshold costs at most {TOLERATED:g} nats here; the smallest is {chosen:g}"
    return (
        f"- **Early exit.** {choice}: {engine['mean_loops']:.2f} loops a token, "
        f"{difference(engine['excess'], engine['error'])} nats, "
        f"{engine['same_top']:.1%} of the likeliest tokens unchanged. Of that, "
        f"{difference(entry['approximation'], entry['error'])} is the approximation of keys and "
        "values that exited tokens never made "
        f"({_verdict(entry['approximation'], entry['error'])}); at most, at threshold "
        f"{worst['threshold']:g}, it is {difference(worst['approximation'], worst['error'])}. A "
        "cosine of the state does not ask the head, so it can be fooled: the loss says by how much."
    )


def _policy_sentences(data: Data) -> list[str]:
    """Of those that keep the least."""
    full = data["policies"][0]
    least = min(row["kv_bytes"] for row in data["policies"])
    return [
        f"- **{row['name']}** keeps {least / full['kv_bytes']:.1%} of the KV bytes and costs "
        f"{difference(row['excess'], row['error'])} nats a token "
        f"({_verdict(row['excess'], row['error'])}); "
        f"{1 - row['same_top']:.1%} of the likeliest tokens change."
        for row in data["policies"][1:]
        if row["kv_bytes"] == least
    ]


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


def _batching_sentence(data: Data, workload: str) -> str:
    """The other ways to end a step against lockstep; which way is the best by which measure."""
    ways = {e["batching"]: e for e in data["batching"] if e["workload"] == workload}
    base = ways["lockstep"]
    parts = []
    for way, entry in ways.items():
        if way == "lockstep":
            continue
        core, steps = (entry[name] / base[name] for name in ("core_applications", "steps"))
        own, large = (entry["weight_bytes"][s] / base["weight_bytes"][s] for s in ("own", SCALED))
        clock, cpu = (median_and_range(found) for found in entry["ratios"].values())
        parts.append(
            f"Against lockstep, {way} applies the core {core:.2f} times as often and takes "
            f"{steps:.2f} times as many steps; modelled weight bytes are {own:.2f} times as many "
            f"here and {large:.2f} times with the layers of {SCALED}; tokens/s measured here "
            f"{clock}, by CPU time {cpu}."
        )
    fewest = {s: min(ways, key=lambda way: ways[way]["weight_bytes"][s]) for s in ("own", SCALED)}
    fastest = max(ways, key=lambda way: ways[way]["ratios"]["second"]["median"])
    return (
        f"- **Depth batching, {workload}.** {' '.join(parts)} "
        f"The fewest weight bytes: {fewest['own']} here, {fewest[SCALED]} with the layers of "
        f"{SCALED}; the fastest on this machine, where a step also takes Python's time: {fastest}."
    )


def _simulated_sentence(data: Data) -> str:
    """The ways that suspend requests, in the shortest and the longest run."""
    numbers = [entry["requests"] for entry in data["simulated"]]
    parts = []
    for requests in (min(numbers), max(numbers)):
        ways = {e["batching"]: e for e in data["simulated"] if e["requests"] == requests}
        base = ways.pop("lockstep")["weight_bytes"]
        found = [
            f"{way} {entry['weight_bytes']['own'] / base['own']:.2f} here and "
            f"{entry['weight_bytes'][SCALED] / base[SCALED]:.2f} with the layers of {SCALED}"
            for way, entry in ways.items()
        ]
        parts.append(f"with {requests} requests {', '.join(found)}")
    return (
        "- **Depth batching, longer runs of mixed.** Weight bytes, simulated, as a multiple of "
        f"lockstep's: {'; '.join(parts)}."
    )


def _verdict(value: float, error: float) -> str:
    """In words: is a difference larger than twice its standard error?"""
    if abs(value) <= 2 * error:
        return "within two standard errors of nothing"
    return f"{'worse' if value > 0 else 'better'} by more than two standard errors"
