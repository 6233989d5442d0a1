"""Known mistakes of exercises 09. The diagnoses give no patient's fault away."""

from minifer.course.grading.mutants import Mutant

_NAME = "the_fault_has_its_name"
_SENSITIVE = "fails_with_the_fault_and_passes_without"
_SPECIFIC = "fails_with_this_fault_and_no_other"
_CONTRACT = "the_new_part_does_what_the_table_says"


def _patient(
    number: int, mistake: str, test: str, old: str, new: str, diagnosis: str
) -> Mutant:
    return Mutant(
        f"ex09_{number}_{mistake}",
        f"9.{number}",
        old=old,
        new=new,
        diagnosis=diagnosis,
        killed_by=f"test_ex09_{number}_{test}",
    )


_NEIGHBOUR = (
    "the name is that of a neighbour in the menu: same place, another mechanism"
)
_CLOSE = "all(abs(a - b) < 1e-3 for a, b in zip(own.logprobs, truth))"

MUTANTS = [
    _patient(
        1,
        "m1_neighbour_named",
        _NAME,
        'return "held-bytes-dropped"',
        'return "stop-string-leaks"',
        _NEIGHBOUR,
    ),
    _patient(
        1,
        "m2_harmless_text",
        _SENSITIVE,
        'text = "“naïve” 你好 👋."',
        'text = "A plain sentence."',
        "the test never brings the fault about: what is said cannot go wrong",
    ),
    _patient(
        1,
        "m3_knows_a_reply",
        _SENSITIVE,
        "assert reply.text == text",
        'assert reply.text == "The import statement"',
        "the test fails on healthy engines: it knows by heart what another model says",
    ),
    _patient(
        1,
        "m4_checks_too_much",
        _SPECIFIC,
        "assert reply.text == text",
        "assert reply.text == text\n    own = engine.ask(text, max_tokens=4)[0]\n"
        f"    truth = engine.oracle(text, own.tokens)\n    assert {_CLOSE}",
        "the test looks at numbers that another fault makes wrong, too",
    ),
    _patient(
        1,
        "m5_held_forgotten",
        _CONTRACT,
        "text = decoder.decode(held + new)",
        "text = decoder.decode(new)",
        "what was held is not put in front of what is new",
    ),
    _patient(
        1,
        "m6_bad_bytes_vanish",
        _CONTRACT,
        'codecs.getincrementaldecoder("utf-8")("replace")',
        'codecs.getincrementaldecoder("utf-8")("ignore")',
        "what can never become a character is left out: it must become U+FFFD",
    ),
    _patient(
        1,
        "m7_healthy_part",
        _CONTRACT,
        'return "characters", characters',
        'return "release", lambda held, new, stops: (held + new, "")',
        "a part is put in anew where the old one was healthy",
    ),
    _patient(
        2,
        "m1_neighbour_named",
        _NAME,
        'return "hash-without-parent"',
        'return "salt-ignored"',
        _NEIGHBOUR,
    ),
    _patient(
        2,
        "m2_search_ends_before_it",
        _SENSITIVE,
        '(reply,) = engine.ask(paragraph + "?")',
        '(reply,) = engine.ask("b" * engine.block_size + paragraph + "?")',
        "the test never brings the fault about: a search ends at the first block that is not found, so "
        "a prompt that begins with what the engine has never seen finds nothing, on any engine",
    ),
    _patient(
        2,
        "m3_a_rightful_hit",
        _SENSITIVE,
        '(reply,) = engine.ask(paragraph + "?")',
        '(reply,) = engine.ask(header + "?")',
        "the test fails on healthy engines: this hit is a right one",
    ),
    _patient(
        2,
        "m4_checks_too_much",
        _SPECIFIC,
        "engine.ask(header + paragraph)\n",
        'engine.ask(header + paragraph)\n    engine.ask(paragraph + "!", salt="other")\n',
        "the test fails for another reason as well: somebody else has asked the same before",
    ),
    _patient(
        2,
        "m5_still_ill",
        _CONTRACT,
        "repr((parent, tokens, salt))",
        "repr((tokens, salt))",
        "the new part has the patient's fault again",
    ),
    _patient(
        2,
        "m6_new_illness",
        _CONTRACT,
        "repr((parent, tokens, salt))",
        "repr((parent, tokens))",
        "the new part cures this fault and brings another one of the menu",
    ),
    _patient(
        2,
        "m7_run_together",
        _CONTRACT,
        "repr((parent, tokens, salt)).encode()",
        '"".join(map(str, (parent, *tokens, salt))).encode()',
        "arguments run together: 12, 3 and 1, 23 give the same name",
    ),
    _patient(
        2,
        "m8_one_byte",
        _CONTRACT,
        "repr((parent, tokens, salt)).encode()).digest()",
        "repr((parent, tokens, salt)).encode()).digest()[:1]",
        "one byte has 256 values: of 1,000 names some are equal",
    ),
    _patient(
        3,
        "m1_neighbour_named",
        _NAME,
        'return "resumed-with-prompt-only"',
        'return "wrong-position-after-preemption"',
        _NEIGHBOUR,
    ),
    _patient(
        3,
        "m2_no_pressure",
        _SENSITIVE,
        "max_tokens=half",
        "max_tokens=4",
        "the test never brings the fault about: the pool never gets full",
    ),
    _patient(
        3,
        "m3_equal_is_well",
        _SENSITIVE,
        "assert len(reply.text) <= len(reply.tokens)",
        "assert len(reply.text) < len(reply.tokens)",
        "the test fails on healthy engines: as many characters as tokens is as it should be",
    ),
    _patient(
        3,
        "m4_checks_too_much",
        _SPECIFIC,
        'for reply in engine.ask("One. ", "Two. ", "Three. ", max_tokens=half):\n'
        "        # A character takes a token at least.\n"
        "        assert len(reply.text) <= len(reply.tokens)",
        'prompts = ("One. ", "Two. ", "Three. ")\n'
        "    for prompt, own in zip(prompts, engine.ask(*prompts, max_tokens=half)):\n"
        "        truth = engine.oracle(prompt, own.tokens)\n"
        f"        assert {_CLOSE}",
        "the test looks at numbers that other faults make wrong, too",
    ),
    _patient(
        3,
        "m5_still_ill",
        _CONTRACT,
        "return prompt + output",
        "return prompt",
        "the new part has the patient's fault again",
    ),
    _patient(
        3,
        "m6_wrong_order",
        _CONTRACT,
        "return prompt + output",
        "return output + prompt",
        "the order of the two is turned round",
    ),
    _patient(
        3,
        "m7_in_place",
        _CONTRACT,
        "return prompt + output",
        "prompt += output\n        return prompt",
        "an argument is changed: += on a list changes the list itself",
    ),
    _patient(
        4,
        "m1_neighbour_named",
        _NAME,
        'return "lost-boundary-slot"',
        'return "off-by-one-length"',
        _NEIGHBOUR,
    ),
    _patient(
        4,
        "m3_healthy_fails",
        _SENSITIVE,
        "assert beside or not is_wrong(text)",
        "assert beside and not is_wrong(text)",
        "the test fails on healthy engines: it wants one of the prompts to go wrong",
    ),
    _patient(
        4,
        "m4_one_prompt",
        _SPECIFIC,
        "assert beside or not is_wrong(text)",
        "assert not is_wrong(text)",
        "the test fails with a neighbour, too: one prompt, or replies of two tokens, cannot tell a fault "
        "of some lengths from a fault of nearly all",
    ),
    _patient(
        4,
        "m2_poisoned_by_the_first",
        _SENSITIVE,
        'beside = is_wrong("x" + text)  # other blocks: nothing of it is found by the next\n'
        "    assert beside or not is_wrong(text)",
        "at = is_wrong(text)\n"
        '    beside = is_wrong(text + "x")\n'
        "    assert beside or not at",
        "the test never fails: all its prompts are of lengths that work, or the second one finds the "
        "first one's blocks and what is wrong in them",
    ),
    _patient(
        4,
        "m5_table_ignored",
        _CONTRACT,
        "table[p // block_size] * block_size + p % block_size",
        "p",
        "tokens lie where their block is, and block ids are not in order",
    ),
    _patient(
        4,
        "m6_one_further",
        _CONTRACT,
        "for p in range(start, end)",
        "for p in range(start + 1, end + 1)",
        "the first slot is missing, and there is one too many at the end",
    ),
    Mutant(
        "ex09_5_m1_tables_die",
        "9.5",
        old="least = self.max_layout if layout else self.min_tokens",
        new="least = self.min_tokens",
        diagnosis="layout has no limit of its own: tables and rulers are killed",
        killed_by="test_ex09_5_tables_rulers_and_code_pass_and_nothing_runs_for_ever",
    ),
    Mutant(
        "ex09_5_m2_layout_runs_for_ever",
        "9.5",
        old="least = self.max_layout if layout else self.min_tokens",
        new="least = 10**9 if layout else self.min_tokens",
        diagnosis="layout is never a loop: a ruler may run to the end of the budget",
        killed_by="test_ex09_5_tables_rulers_and_code_pass_and_nothing_runs_for_ever",
    ),
    Mutant(
        "ex09_5_m3_newest_text_decides",
        "9.5",
        old='layout = is_layout("".join(self.texts[:p]))',
        new="layout = is_layout(text)",
        diagnosis="the newest token's text is judged: the whole passage decides what is layout",
        killed_by="test_ex09_5_tables_rulers_and_code_pass_and_nothing_runs_for_ever",
    ),
    Mutant(
        "ex09_5_m4_first_passage_forgotten",
        "9.5",
        old="tail = p + run",
        new="tail = run",
        diagnosis="the first passage is not counted: it belongs to the tail",
        killed_by="test_ex09_5_loops_are_found_when_they_are_loops",
    ),
    Mutant(
        "ex09_5_m5_no_count",
        "9.5",
        old="if tail >= max(least, self.min_count * p):",
        new="if tail >= least:",
        diagnosis="a long passage that is there twice counts as a loop: min_count is not asked",
        killed_by="test_ex09_5_loops_are_found_when_they_are_loops",
    ),
    Mutant(
        "ex09_5_m6_forgets_the_alarm",
        "9.5",
        old="        for p, run in self.runs.items():",
        new="        self.tripped = False\n        for p, run in self.runs.items():",
        diagnosis="once a loop, always a loop: the answer goes back to False",
        killed_by="test_ex09_5_loops_are_found_when_they_are_loops",
    ),
    Mutant(
        "ex09_5_m7_one_token_only",
        "9.5",
        old="for p, old in enumerate(self.tokens, start=1)",
        new="for p, old in enumerate(self.tokens[:1], start=1)",
        diagnosis="only a token that repeats itself is found, and no longer passage",
        killed_by="test_ex09_5_loops_are_found_when_they_are_loops",
    ),
    Mutant(
        "ex09_5_m8_keeps_all",
        "9.5",
        old="self.tokens = [token, *self.tokens][: self.max_period]",
        new="self.tokens = [token, *self.tokens]",
        diagnosis="the whole reply is kept and compared: a push gets dearer with every token",
        killed_by="test_ex09_5_a_push_costs_no_more_late_than_early",
    ),
    Mutant(
        "ex09_5_m9_nothing_equal",
        "9.5",
        old="        self.runs = {\n"
        "            p: self.runs.get(p, 0) + 1\n"
        "            for p, old in enumerate(self.tokens, start=1)\n"
        "            if old == token\n"
        "        }\n",
        new="        self.runs = {\n"
        "            p: self.runs.get(p, 0) + 1 if old == token else 0\n"
        "            for p, old in enumerate(self.tokens, start=1)\n"
        "        }\n",
        diagnosis="a period counts in which no token equals the one before: with min_count = 1 any text "
        "is a loop",
        killed_by="test_ex09_5_loops_are_found_when_they_are_loops",
    ),
    Mutant(
        "ex09_6_m1_name_alone",
        "9.6",
        old="call = (name, same_spelling(arguments), same_spelling(result))",
        new="call = name",
        diagnosis="three calls of one tool are no loop when they ask for different things",
        killed_by="test_ex09_6_equal_calls_in_a_row_are_a_loop",
    ),
    Mutant(
        "ex09_6_m2_result_ignored",
        "9.6",
        old="call = (name, same_spelling(arguments), same_spelling(result))",
        new="call = (name, same_spelling(arguments))",
        diagnosis="polling is called a loop: a result that changes is progress",
        killed_by="test_ex09_6_progress_and_allowed_tools_are_no_loop",
    ),
    Mutant(
        "ex09_6_m3_letters_compared",
        "9.6",
        old="return json.dumps(json.loads(text), sort_keys=True)",
        new="return text",
        diagnosis="the JSON's letters are compared and not its values",
        killed_by="test_ex09_6_spelling_does_not_count",
    ),
    Mutant(
        "ex09_6_m4_order_of_keys",
        "9.6",
        old="return json.dumps(json.loads(text), sort_keys=True)",
        new="return json.dumps(json.loads(text))",
        diagnosis="the order of an object's keys makes a difference, and should make none",
        killed_by="test_ex09_6_spelling_does_not_count",
    ),
    Mutant(
        "ex09_6_m5_not_in_a_row",
        "9.6",
        old="count = count + 1 if call == last else 1",
        new="count = count + 1 if call == last else max(1, count)",
        diagnosis="the count goes on over other calls: only calls in a row are a loop",
        killed_by="test_ex09_6_equal_calls_in_a_row_are_a_loop",
    ),
    Mutant(
        "ex09_6_m6_allowed_interrupts",
        "9.6",
        old="        if name in allow:\n            continue",
        new="        if name in allow:\n            last = None\n            continue",
        diagnosis="an allowed tool interrupts a loop of another: it should be left out",
        killed_by="test_ex09_6_progress_and_allowed_tools_are_no_loop",
    ),
    Mutant(
        "ex09_6_m7_one_late",
        "9.6",
        old="if count >= limit:",
        new="if count > limit:",
        diagnosis="the loop is complete with call number `limit`, one earlier",
        killed_by="test_ex09_6_equal_calls_in_a_row_are_a_loop",
    ),
    Mutant(
        "ex09_6_m8_blanks_around_text",
        "9.6",
        old="return text.strip()",
        new="return text",
        diagnosis="blanks at the ends of what is no JSON make a difference",
        killed_by="test_ex09_6_spelling_does_not_count",
    ),
    Mutant(
        "ex09_6_m9_text_taken_for_json",
        "9.6",
        old="return text.strip()",
        new="return json.dumps(text.strip())",
        diagnosis='a bare text counts as the JSON text of the same letters: a and "a" are two values',
        killed_by="test_ex09_6_spelling_does_not_count",
    ),
    Mutant(
        "ex09_6_m10_nan_is_not_itself",
        "9.6",
        old="return json.dumps(json.loads(text), sort_keys=True)",
        new="return json.dumps(json.loads(text), sort_keys=True, allow_nan=False)",
        diagnosis="NaN is taken for no JSON, and blanks beside it make a difference",
        killed_by="test_ex09_6_spelling_does_not_count",
    ),
]

_ASK = '`for reply in engine.ask("One. ", "Two. ", "Three. ", max_tokens=half):` → '
_HALF = "test_3: `half = engine.num_blocks * engine.block_size // 2` → "
_FULL = "any length at which three replies overfill the pool will do"
_MAX = "test_4.is_wrong: `return max(errors) > 1e-4` → "
_TEXT = 'test_4: `text = "The for statement is used to iterate"[: 2 * engine.block_size]` → '
_BLOCKS = "any number of whole blocks will do"
_TEXTS = "LoopGuard.push: `self.texts = [text, *self.texts][: self.max_period]` → "
_COUNT = "the first call sets the count, whatever it was"
SURVIVORS = {
    _HALF + "`half = engine.num_blocks * engine.block_size // 3`": _FULL,
    _HALF + "`half = engine.num_blocks * engine.block_size // 1`": _FULL,
    "test_3: "
    + _ASK
    + "`for reply in engine.ask('Two. ', 'One. ', 'Three. ', max_tokens=half):`": (
        "the three prompts may come in any order"
    ),
    _TEXT
    + '`text = "The for statement is used to iterate"[: 3 * engine.block_size]`': _BLOCKS,
    _TEXT
    + '`text = "The for statement is used to iterate"[: 1 * engine.block_size]`': _BLOCKS,
    _MAX + "`return max(errors) >= 0.0001`": "no difference is 0.0001 to the last bit",
    _MAX + "`return max(errors) > 1.0001`": (
        "in a prompt so short the lost slot moves some token by more than 1 nat"
    ),
    "test_4.is_wrong: `errors = [abs(ours - true) for ours, true in pairs]` → "
    "`errors = [ours - true for ours, true in pairs]`": (
        "the engine draws what it finds likely, so some token seems less likely to the oracle"
    ),
    "test_4.is_wrong: `pairs = zip(reply.logprobs, truth, strict=True)` → "
    "`pairs = zip(truth, reply.logprobs, strict=True)`": (
        "the difference has the same size the other way round"
    ),
    "find_loop: `last, count = None, 0` → `last, count = None, 1`": _COUNT,
    "find_loop: `last, count = None, 0` → `last, count = None, (-1)`": _COUNT,
    _TEXTS + "`self.texts = [text, *self.texts][:self.max_period + 1]`": (
        "a text more is kept and never looked at"
    ),
}
