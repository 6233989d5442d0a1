"""Tests of exercises 08: top-p, penalties, streamed text, stop strings, randomness.

Truth: exact fractions, the engine's slow sampler, decoding the whole reply, and the engine's
automaton of stop strings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch

from minifer.course.grading import compare, points, probe, unchanged
from minifer.execution.logits_rules import apply_penalties
from minifer.execution.sampler_reference import reference_probabilities
from minifer.outputs import RequestGroup
from minifer.postprocessing.stop_strings import StopStrings
from minifer.request import Request
from minifer.sampling_params import SamplingParams

CUT = "\ufffd"


def demand(holds: bool, tried: str, expected: str) -> None:
    """For what is true or not: the message says what was wanted, not "expected True"."""
    if not holds:
        raise AssertionError(f"tried     {tried}\nexpected  {expected}")


def short_list(values: Sequence[Any]) -> str:
    return str(list(values)) if len(values) <= 20 else f"<{len(values)} values>"


def request(prompt: Sequence[int], output: Sequence[int], **params: Any) -> Request:
    """A request that has drawn `output`."""
    tokens = [*prompt, *output]
    group = RequestGroup("r", None)
    return Request("r", list(prompt), SamplingParams(**params), group, token_ids=tokens)


# -- 8.1


def check_nucleus(
    target: Any, logits: torch.Tensor, T: float, top_p: float, truth: Any
) -> None:
    """truth: {token: probability}."""
    row = short_list(logits.tolist())
    tried = f"nucleus(logits={row}, temperature={T}, top_p={top_p})"
    with unchanged(tried, logits=logits):
        got = target.nucleus(logits, T, top_p)
    expected = torch.zeros(len(logits), dtype=torch.float64)
    for token, p in truth.items():
        expected[token] = float(p)
    compare(got, expected, tried, atol=2e-6)  # logits are float32
    compare(got.dtype, torch.float64, f"{tried}.dtype")
    compare(
        got.nonzero()[:, 0].tolist(), sorted(truth), f"tokens that are not 0 in {tried}"
    )


def exact_nucleus(weights: Sequence[int], top_p: Fraction) -> dict[int, Fraction]:
    """Kept tokens and probabilities, in fractions."""
    total, before, kept = sum(weights), 0, {}
    for token in sorted(range(len(weights)), key=lambda t: (-weights[t], t)):
        if Fraction(before, total) < top_p or top_p == 1:
            kept[token] = weights[token]
        before += weights[token]
    return {token: Fraction(w, sum(kept.values())) for token, w in kept.items()}


@points("8.1", 2)
def test_ex08_1_the_token_that_crosses_stays(target, rng):
    cases = [[1], [5, 3, 2], [2, 3, 5], [4, 3, 2, 1]]
    cases += [[rng.randint(1, 30) for _ in range(n)] for n in (2, 3, 5, 9)]
    for weights in cases:
        total = sum(weights)
        logits = torch.tensor(weights).double().div(total).log().float()
        mass = 0
        for weight in sorted(weights, reverse=True):
            mass += weight
            for top_p in (Fraction(2 * mass - 1, 2 * total), Fraction(mass, total)):
                truth = exact_nucleus(weights, top_p)
                check_nucleus(target, logits, 1.0, float(top_p), truth)
            if mass < total:
                top_p = Fraction(2 * mass + 1, 2 * total)
                check_nucleus(
                    target, logits, 1.0, float(top_p), exact_nucleus(weights, top_p)
                )


@points("8.1", 1)
def test_ex08_1_of_equals_the_lower_ids_stay(target, rng):
    # From 17 numbers on, an unstable sort of torch's shuffles equals.
    cases = ((2, 0.5), (4, 0.5), (4, 0.6), (7, 0.01), (10, 0.35), (40, 0.35))
    for size, top_p in cases:
        level = rng.choice((-3.0, 0.0, 2.5))
        truth = exact_nucleus([1] * size, Fraction(str(top_p)))
        check_nucleus(target, torch.full((size,), level), 1.0, top_p, truth)
    for size in (5, 12, 60):
        weights = [rng.choice((1, 2, 2, 4)) for _ in range(size)]
        logits = torch.tensor(weights).double().log().float()
        top_p = Fraction(rng.randint(1, 2 * sum(weights) - 1), 2 * sum(weights))
        check_nucleus(target, logits, 1.0, float(top_p), exact_nucleus(weights, top_p))


@points("8.1", 1)
def test_ex08_1_temperature_comes_first_and_nothing_overflows(target, rng):
    half, third, fifth = (torch.tensor(p).log() for p in (0.5, 0.3, 0.2))
    small = torch.stack([half, third, fifth])
    for T, top_p in ((2.0, 0.45), (0.5, 0.6), (2.0, 0.75), (1.0, 1.0)):
        truth = reference_probabilities(
            small.tolist(), request([], [], temperature=T, top_p=top_p)
        )
        check_nucleus(target, small, T, top_p, truth)
    # So high a temperature makes equal what is not: the order is that of the logits.
    check_nucleus(target, torch.tensor([3.0, 4.0]), 1e17, 0.4, {1: 1.0})
    steep = torch.tensor([0.0, -18.0, -torch.inf, -3.0])  # the second has 1.5e-8
    truth = reference_probabilities(steep.tolist(), request([], [], temperature=1.0))
    check_nucleus(target, steep, 1.0, 1.0, truth)
    for size in (3, 8, 20):
        logits = torch.tensor([rng.gauss(0, 3) for _ in range(size)]) + rng.choice(
            (-500, 500)
        )
        logits[rng.randrange(size - 1)] = -torch.inf
        T, top_p = rng.choice((0.3, 0.5, 1.7)), rng.choice((0.2, 0.6, 0.9))
        params = request([], [], temperature=T, top_p=top_p)
        truth = reference_probabilities(logits.tolist(), params)
        check_nucleus(target, logits, T, top_p, truth)


@points("8.1", 1, hidden=True)
def test_ex08_1_large_rows(target, rng, generator):
    for size in (300, 3000):
        logits = 4 * torch.randn(size, generator=generator)
        logits[torch.rand(size, generator=generator) < 0.2] = -torch.inf
        for T, top_p in ((0.7, 0.9), (1.0, 0.5), (1.8, 0.95)):
            params = request([], [], temperature=T, top_p=top_p)
            truth = reference_probabilities(logits.tolist(), params)
            check_nucleus(target, logits, T, top_p, truth)


@probe("8.1")
def probe_nucleus(target):
    three, ties = torch.tensor([0.5, 0.3, 0.2]).log(), torch.zeros(4)
    cases = [(three, 1.0, 0.6), (three, 1.0, 0.8), (three, 2.0, 0.45), (ties, 1.0, 0.4)]
    cases += [(three + 500, 0.5, 0.9), (torch.tensor([3.0, 4.0]), 1e17, 0.4)]
    cases += [(three.flip(0), 1.0, 0.6)]
    return [
        target.nucleus(*case).nan_to_num(-1).mul(1e6).round().tolist() for case in cases
    ]


# -- 8.2


def check_penalties(
    target: Any, logits: Any, prompt: Any, output: Any, *penalties: float
) -> None:
    inputs = ", ".join(map(short_list, (logits.tolist(), prompt, output)))
    tried = f"penalize({inputs}, {', '.join(map(str, penalties))})"
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    expected = logits.clone()
    apply_penalties(
        expected, request(prompt, output, **dict(zip(names, penalties, strict=True)))
    )
    with unchanged(tried, logits=logits, prompt=prompt, output=output):
        got = target.penalize(logits, prompt, output, *penalties)
    compare(got, expected, tried, atol=1e-5, rtol=1e-5)


def some(rng: random.Random, size: int, count: int) -> list[int]:
    return [rng.randrange(size) for _ in range(count)]


@points("8.2", 1)
def test_ex08_2_repetition_looks_at_prompt_and_output(target, rng):
    small = torch.tensor([2.0, -2.0, 1.0, -1.0, 0.5])
    check_penalties(target, small, [0], [], 2.0, 0.0, 0.0)
    check_penalties(target, small, [], [0], 2.0, 0.0, 0.0)
    check_penalties(target, small, [0, 1], [2, 2, 3], 2.0, 0.0, 0.0)
    for size in (4, 9):
        logits = torch.tensor([rng.uniform(0.5, 4) for _ in range(size)])
        check_penalties(
            target, logits, some(rng, size, 2), some(rng, size, 2), 1.7, 0.0, 0.0
        )


@points("8.2", 1)
def test_ex08_2_presence_and_frequency_look_at_the_output(target, rng):
    small = torch.tensor([2.0, -2.0, 1.0, -1.0, 0.5])
    for presence, frequency in ((0.5, 0.0), (0.0, 0.5), (0.75, 0.5), (-0.5, 0.25)):
        check_penalties(target, small, [0, 1], [2], 1.0, presence, frequency)
        check_penalties(target, small, [2, 0], [2], 1.0, presence, frequency)
        check_penalties(target, small, [0, 1], [2, 2, 3], 1.0, presence, frequency)
        output = some(rng, 5, 8)
        check_penalties(
            target, small, some(rng, 5, 8), output, 1.0, presence, frequency
        )


@points("8.2", 1)
def test_ex08_2_signs_repeats_and_masks(target):
    signs = torch.tensor([3.0, -3.0, 0.0, -torch.inf, 1.0])
    check_penalties(target, signs, [1], [], 1.5, 0.0, 0.0)
    check_penalties(target, signs, [0, 0, 0], [0], 2.0, 0.0, 0.0)
    check_penalties(target, signs, [0, 1, 2, 3], [1, 3], 2.0, 0.5, 0.25)
    check_penalties(target, signs, [2, 3], [3, 3, 0, 0], 0.5, 1.0, 1.0)


@points("8.2", 1, hidden=True)
def test_ex08_2_all_three_together(target, rng, generator):
    for size in (5, 60, 200):
        for _ in range(4):
            logits = 3 * torch.randn(size, generator=generator)
            penalties = (
                rng.choice((0.8, 1.3, 2.0)),
                rng.uniform(-2, 2),
                rng.uniform(-1, 2),
            )
            prompt, output = some(rng, size, rng.randint(0, 30)), some(rng, size, 30)
            check_penalties(target, logits, prompt, output, *penalties)


@probe("8.2")
def probe_penalties(target):
    logits = torch.tensor([2.0, -2.0, 1.0, -1.0, 0.5])
    kept = logits.clone()
    cases = [(2.0, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, 0.5), (2.0, 0.5, 0.5)]
    found = [
        target.penalize(logits, [0, 0, 1], [2, 2, 3], *case).tolist() for case in cases
    ]
    found.append(target.penalize(logits, [2, 2, 0], [2, 0], 1.0, 0.0, 0.5).tolist())
    return [*found, logits.equal(kept)]


# -- 8.3


class Vocabulary:
    """A vocabulary of byte strings. longest: most ids that one call of `decode` was given."""

    def __init__(self, pieces: Sequence[bytes], *, drops_space: bool = False) -> None:
        self.pieces, self.drops_space, self.longest = list(pieces), drops_space, 0

    def decode(self, ids: Sequence[int]) -> str:
        self.longest = max(self.longest, len(ids))
        text = b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.drops_space else text


def chunks_of(decode: Callable[[list[int]], str], ids: list[int]) -> list[str]:
    """What each push and the flush return: by decoding the whole reply every time."""
    shown, chunks = "", []
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        chunks.append("" if text.endswith(CUT) else text[len(shown) :])
        shown += chunks[-1]
    return [*chunks, decode(ids)[len(shown) :]]


def check_stream(
    target: Any, pieces: Sequence[bytes], *, drops_space: bool = False
) -> Vocabulary:
    """Stream pieces[0], pieces[1], … as one reply. Returns the vocabulary that was used."""
    truth, used = (Vocabulary(pieces, drops_space=drops_space) for _ in range(2))
    ids = list(range(len(pieces)))
    kind = "decode drops one leading space; " if drops_space else ""
    tried = f"{kind}tokens {list(pieces)}: each push, then flush"
    stream = target.Detokenizer(used.decode)
    got = [stream.push(token) for token in ids] + [stream.flush()]
    compare(got, chunks_of(truth.decode, ids), tried)
    return used


def split(rng: random.Random, data: bytes, longest: int) -> list[bytes]:
    """Data in random pieces of 1 to `longest` bytes."""
    pieces = []
    while data:
        size = rng.randint(1, longest)
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def text_of(rng: random.Random, count: int) -> str:
    return "".join(rng.choices("ab  é日👋🏽\n", k=count))


def one_each(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


@points("8.3", 2)
def test_ex08_3_whole_characters_byte_by_byte(target, rng):
    for text in ("é", "Hi 👋!", "日本", "a👋🏽b"):
        check_stream(target, one_each(text))
    for count in (5, 12, 25):
        check_stream(target, one_each(text_of(rng, count) + "é"))


@points("8.3", 1)
def test_ex08_3_tokens_that_straddle_characters(target, rng):
    check_stream(target, ["é".encode() + b"\xe6", b"\x97\xa5!"])
    check_stream(target, [b"a\xf0", b"\x9f\x91", b"\x8b b"])
    for longest in (2, 3, 5):
        check_stream(target, split(rng, (text_of(rng, 15) + "日é").encode(), longest))


@points("8.3", 1)
def test_ex08_3_spaces_and_tokens_without_text(target, rng):
    check_stream(target, [b" hi", b" there"], drops_space=True)
    check_stream(target, [b" ", b" ", b"x", b" ", b" y"], drops_space=True)
    check_stream(target, [b"", b" hi", b"", b" there", b""], drops_space=True)
    check_stream(
        target, [b" hi", b"", b"", b" \xc3", b"\xa9", b"", b" x"], drops_space=True
    )
    for _ in range(6):
        pieces = [rng.choice((b" a", b" ", b"", b"b", b" \xc3\xa9")) for _ in range(12)]
        check_stream(target, pieces, drops_space=True)


@points("8.3", 1)
def test_ex08_3_the_end_of_a_cut_reply(target, rng):
    for cut in (1, 2, 3):
        check_stream(target, one_each("Hi 👋")[:-cut])
    check_stream(target, split(rng, text_of(rng, 6).encode() + b"\xe6\x97", 3))
    stream = target.Detokenizer(Vocabulary([b"\xf0", b"\x9f"]).decode)
    got = [stream.push(0), stream.push(1), stream.flush(), stream.flush()]
    compare(got, ["", "", CUT, ""], "tokens F0, 9F: push, push, flush, flush")


@points("8.3", 1, hidden=True)
def test_ex08_3_a_long_reply_costs_no_more_per_token(target, rng):
    words = [b" a", b" the", b"", "é".encode(), b" \xe6", b"\x97", b"\xa5", b"\n"]
    for drops_space in (False, True):
        pieces: list[bytes] = []
        while len(pieces) < 400:
            first = rng.choice(words[:5] + words[7:])
            pieces += [first, *words[5:7]] if first == words[4] else [first]
            if pieces[-4:] == [b""] * 4:
                pieces.append(b"x")
        used = check_stream(target, pieces, drops_space=drops_space)
        demand(
            used.longest <= 16,
            f"a reply of {len(pieces)} tokens; the longest call of decode got {used.longest} ids",
            "at most 16 ids in a call of decode",
        )


@probe("8.3")
def probe_stream(target):
    replies = [
        ([bytes([b]) for b in "é👋".encode()], False),
        ([b" hi", b" there", b"", b" x"], True),
        ([b"a", b"\xf0", b"\x9f"], False),
    ]
    found: list[Any] = []
    for pieces, drops_space in replies:
        vocabulary = Vocabulary(pieces, drops_space=drops_space)
        stream = target.Detokenizer(vocabulary.decode)
        found += [stream.push(token) for token in range(len(pieces))]
        found += [stream.flush(), stream.flush(), vocabulary.longest]
    long = Vocabulary([b"x"] * 40)
    stream = target.Detokenizer(long.decode)
    return [*found, *(stream.push(token) for token in range(40)), long.longest]


# -- 8.4


def follow(matcher: Any, pieces: Sequence[str]) -> list[Any]:
    """What each push returns, what the flush does, and the hit."""
    return [*(matcher.push(piece) for piece in pieces), matcher.flush(), matcher.hit]


def check_text(target: Any, stops: list[str], pieces: Sequence[str]) -> None:
    """All text that is shown, and the hit; when it is shown does not count here."""
    tried = f"StopMatcher({stops}), pieces {list(pieces)}: all text that is shown, hit"
    with unchanged(tried, stops=stops):
        *got, hit = follow(target.StopMatcher(stops), pieces)
    *expected, right = follow(StopStrings(stops), pieces)
    compare(["".join(got), hit], ["".join(expected), right], tried)


def check_steps(
    target: Any, stops: list[str], pieces: Sequence[str], include: bool
) -> None:
    tried = (
        f"StopMatcher({stops}, {include}), pieces {list(pieces)}: each push, flush, hit"
    )
    got = follow(target.StopMatcher(stops, include), pieces)
    compare(got, follow(StopStrings(stops, include), pieces), tried)


def cuts(text: str) -> list[list[str]]:
    """All ways to cut a text into pieces, the whole text first."""
    if len(text) < 2:
        return [[text]] if text else [[]]
    tails = [
        (text[:n], rest) for n in range(len(text), 0, -1) for rest in cuts(text[n:])
    ]
    return [[head, *rest] for head, rest in tails]


@points("8.4", 2)
def test_ex08_4_found_over_any_border_and_never_shown(target, rng):
    check_text(target, ["b"], ["abc"])
    for text, stops in (
        ("xENDy", ["END"]),
        ("aaab", ["aab"]),
        ("ababac", ["abac", "zz"]),
    ):
        for pieces in cuts(text):
            check_text(target, stops, pieces)
    for _ in range(20):
        text = "".join(rng.choices("ab", k=8)) + "aab"
        check_text(target, ["aab", "bbb"], rng.choice(cuts(text)))


@points("8.4", 1)
def test_ex08_4_holds_back_no_more_than_it_must(target, rng):
    check_steps(target, ["xyy"], list("xxx yy"), False)
    check_steps(target, ["END"], ["AN", " E", "ND of"], False)
    check_steps(target, [], ["ab", "c"], False)
    check_steps(target, ["abcd", "bce"], list("xabcfab"), False)
    for _ in range(20):
        check_steps(
            target,
            ["abb", "bab"],
            rng.choice(cuts("".join(rng.choices("ab", k=7)))),
            False,
        )


@points("8.4", 1)
def test_ex08_4_the_first_to_complete_wins_then_the_list(target):
    for stops in (
        ["cd", "abc"],
        ["bc", "abc"],
        ["abc", "bc"],
        ["abcd", "c"],
        ["c", "c"],
    ):
        for pieces in (["xabcdy"], ["xa", "b", "cdy"], list("xabcdy")):
            check_text(target, stops, pieces)


@points("8.4", 1)
def test_ex08_4_the_end_and_a_stop_that_is_included(target):
    for pieces in (["xENDy"], ["xE", "ND", "y"], list("xENDyE"), ["E", "N"]):
        check_steps(target, ["END"], pieces, True)
        check_steps(target, ["END"], pieces, False)
    matcher = target.StopMatcher(["END"])
    got = [matcher.push("aEN"), matcher.flush(), matcher.flush()]
    compare(got, ["a", "EN", ""], 'StopMatcher(["END"]): push("aEN"), flush(), flush()')
    matcher = target.StopMatcher(["b"])
    got = [matcher.push("abab"), matcher.push("c"), matcher.flush(), matcher.hit]
    compare(
        got,
        ["a", "", "", "b"],
        'StopMatcher(["b"]): push("abab"), push("c"), flush(), hit',
    )


@points("8.4", 1, hidden=True)
def test_ex08_4_many_random_streams(target, rng):
    for _ in range(150):
        stops = [
            "".join(rng.choices("abé", k=rng.randint(1, 6)))
            for _ in range(rng.randint(0, 4))
        ]
        pieces = ["".join(rng.choices("abé", k=rng.randint(0, 3))) for _ in range(12)]
        check_steps(target, stops, pieces, rng.random() < 0.3)


@probe("8.4")
def probe_stops(target):
    cases: list[tuple[list[str], list[str], bool]] = [
        (["END"], ["AN", " E", "ND of"], False),
        (["aab"], list("aaab"), False),
        (["END"], ["xEN", "Dy"], True),
        (["bc", "abc"], ["xabcd"], False),
        (["cd", "abc"], ["xabcdy"], False),
        (["END"], ["aEN"], False),
        (["b"], ["abab", "c"], False),
    ]
    return [
        follow(target.StopMatcher(stops, inc), pieces) for stops, pieces, inc in cases
    ]


# -- 8.5

WIDE = torch.zeros(1, 500)  # 500 equal tokens: two draws agree by chance once in 500


def drawn(
    target: Any, logits: Any, seeds: Sequence[int], indices: Sequence[int]
) -> list[int]:
    """What draw_batch returns, which must be a list of ints, a row each."""
    tokens = target.draw_batch(logits, list(seeds), list(indices))
    fits = type(tokens) is list and [type(token) for token in tokens] == [int] * len(
        seeds
    )
    given = [type(t).__name__ for t in tokens][:4] if type(tokens) is list else tokens
    demand(
        fits,
        f"draw_batch of {len(seeds)} rows",
        f"a list of {len(seeds)} ints, not {given}",
    )
    return tokens


def wide(target: Any, seeds: Sequence[int], indices: Sequence[int]) -> list[int]:
    """Tokens drawn from 500 equal ones, a row each."""
    return drawn(target, WIDE.expand(len(seeds), -1).clone(), seeds, indices)


def check_varied(tokens: Sequence[int], tried: str) -> None:
    varied = len(set(tokens)) > len(tokens) // 2
    demand(varied, f"{tried}: got {list(tokens)[:12]} …", "tokens that vary")


@points("8.5", 1)
def test_ex08_5_a_function_of_row_seed_and_index(target, rng, generator):
    seeds, indices = (
        [rng.getrandbits(64) for _ in range(8)],
        [rng.randrange(50) for _ in range(8)],
    )
    check_varied(wide(target, seeds, indices), "8 seeds, 500 equal tokens")
    logits = 0.3 * torch.randn(8, 500, generator=generator)
    compare(target.draw_batch(logits[:0], [], []), [], "draw_batch(no rows)")
    tried = "draw_batch(logits [8, 500], seeds, indices)"
    with unchanged(tried, logits=logits, seeds=seeds, indices=indices):
        together = target.draw_batch(logits, seeds, indices)
    compare(
        target.draw_batch(logits, seeds, indices), together, f"{tried}, the second time"
    )
    alone = [
        target.draw_batch(logits[r : r + 1], [seeds[r]], [indices[r]])[0]
        for r in range(8)
    ]
    compare(alone, together, f"{tried}, each row alone")
    order = rng.sample(range(8), 8)
    turned = target.draw_batch(
        logits[order], [seeds[r] for r in order], [indices[r] for r in order]
    )
    compare(turned, [together[r] for r in order], f"{tried}, rows in the order {order}")
    twice = target.draw_batch(logits[[3, 3]], [seeds[3]] * 2, [indices[3]] * 2)
    compare(twice, [together[3]] * 2, f"{tried}, row 3 twice in one batch")


def check_frequencies(tokens: Sequence[int], p: Sequence[float], tried: str) -> None:
    """Chi-square far above what right draws reach (once in a million: 33 for 4 degrees)."""
    expected = [len(tokens) * x for x in p]
    counts = [sum(t == token for t in tokens) for token in range(len(p))]
    chi = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e)
    masked = [counts[token] for token, x in enumerate(p) if not x]
    compare(sum(masked), 0, f"{tried}: draws of masked tokens")
    demand(
        chi < 40,
        f"{tried}: counts {counts}",
        f"about {[round(e) for e in expected]}, the softmax's",
    )


@points("8.5", 1)
def test_ex08_5_draws_follow_the_softmax(target, rng):
    p = [0.0, 0.5, 0.25, 0.15, 0.1]
    logits = torch.tensor(p).log().expand(3000, -1).clone()
    start = rng.getrandbits(32)
    seeds, places = list(range(start, start + 3000)), list(range(3000))
    for chosen in (seeds, [start] * 3000):
        kind = "3000 seeds, index 0" if chosen is seeds else "one seed, 3000 indices"
        indices = [0] * 3000 if chosen is seeds else places
        check_frequencies(drawn(target, logits, chosen, indices), p, kind)


@points("8.5", 1)
def test_ex08_5_seed_and_index_are_not_mixed_up(target, rng):
    base = [rng.randrange(100, 2**40) for _ in range(40)]
    index = [rng.randrange(1, 90) for _ in range(40)]
    mine = wide(target, base, index)
    check_varied(mine, "40 seeds, 500 equal tokens")
    others = {
        "the next index": (base, [i + 1 for i in index]),
        "seed + 1, the same index": ([s + 1 for s in base], index),
        "seed - 1, index + 1 (their sum is the same)": (
            [s - 1 for s in base],
            [i + 1 for i in index],
        ),
        "another upper half of the seed": ([s + 2**63 for s in base], index),
        "seed and index exchanged": (index, base),
    }
    for what, (seeds, indices) in others.items():
        same = sum(
            a == b for a, b in zip(mine, wide(target, seeds, indices), strict=True)
        )
        demand(
            same < 8,  # by chance 0.08 of 40 agree
            f"40 draws against {what}: {same} of 40 tokens are the same",
            "other randomness, so hardly a token is the same",
        )
    digits = (
        wide(target, [12, 123, 77], [34, 4, 1]),
        wide(target, [123, 12, 7], [4, 34, 71]),
    )
    demand(
        digits[0] != digits[1],
        "(seed 12, index 34) against (123, 4), (123, 4) against (12, 34), (77, 1) against (7, 71)",
        "other tokens: digits written one after the other are the same text",
    )


@points("8.5", 1)
def test_ex08_5_the_callers_generators_are_left_alone(target, rng):
    seeds = [rng.getrandbits(60) for _ in range(12)]
    before = random.getstate(), torch.get_rng_state()
    tokens = wide(target, seeds, [0] * 12)
    check_varied(tokens, "12 seeds, 500 equal tokens")
    demand(
        random.getstate() == before[0],
        "the state of `random` after draw_batch",
        "the state before: the caller's generator is neither seeded nor advanced",
    )
    demand(
        torch.get_rng_state().equal(before[1]),
        "the state of torch's generator after draw_batch",
        "the state before: the caller's generator is neither seeded nor advanced",
    )


@probe("8.5")
def probe_draws(target):
    first = wide(target, [5, 6, 7], [3, 3, 3])
    again = wide(target, [7, 5], [3, 3])
    state, other = torch.get_rng_state(), random.getstate()
    summed = wide(target, [4], [4]) == first[:1]
    later = wide(target, [5], [9]) == first[:1]
    joined = wide(target, [12], [34]) == wide(target, [123], [4])
    kept = [torch.get_rng_state().equal(state), random.getstate() == other]
    placed = wide(target, [9, 6], [3, 3])[1] == first[1]
    masked = torch.tensor([[0.0, 3.0, -torch.inf]]).expand(40, -1).clone()
    spread = sorted(set(target.draw_batch(masked, list(range(40)), [0] * 40)))
    return [again == [first[2], first[0]], summed, later, joined, placed, kept, spread]
