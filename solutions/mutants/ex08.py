"""Known mistakes of exercises 08."""

from minifer.course.grading.mutants import Mutant

MUTANTS = [
    Mutant(
        "ex08_1_m1_crossing_token_excluded",
        "8.1",
        old="before = p[order].cumsum(-1) - p[order]",
        new="before = p[order].cumsum(-1)",
        diagnosis="the sum that is compared with top_p must stop before the token: now the token "
        "that crosses top_p is cut, and at a small top_p nothing is left",
        killed_by="test_ex08_1_the_token_that_crosses_stays",
    ),
    Mutant(
        "ex08_1_m2_not_renormalised",
        "8.1",
        old="return kept / kept.sum()",
        new="return kept",
        diagnosis="what is kept must be rescaled to add up to 1",
        killed_by="test_ex08_1_the_token_that_crosses_stays",
    ),
    Mutant(
        "ex08_1_m3_temperature_after_top_p",
        "8.1",
        old="""    before = p[order].cumsum(-1) - p[order]
""",
        new="""    cold = scores.softmax(-1)
    before = cold[order].cumsum(-1) - cold[order]
""",
        diagnosis="top_p is compared with probabilities from before the temperature: temperature "
        "comes first",
        killed_by="test_ex08_1_temperature_comes_first_and_nothing_overflows",
    ),
    Mutant(
        "ex08_1_m4_of_equals_the_highest_id",
        "8.1",
        old="order = torch.sort(logits, descending=True, stable=True).indices",
        new="order = torch.sort(logits, stable=True).indices.flip(0)",
        diagnosis="among equal logits the lower id comes first, not the higher",
        killed_by="test_ex08_1_of_equals_the_lower_ids_stay",
    ),
    Mutant(
        "ex08_1_m5_reaching_adds_one_more",
        "8.1",
        old="keep = order[before < top_p * (1 - 1e-6)]",
        new="keep = order[before <= top_p * (1 + 1e-6)]",
        diagnosis="where the sum has reached top_p exactly, the next token is not kept",
        killed_by="test_ex08_1_the_token_that_crosses_stays",
    ),
    Mutant(
        "ex08_1_m6_largest_not_taken_off",
        "8.1",
        old="p = (scores / temperature).softmax(-1)",
        new="p = (scores / temperature).exp() / (scores / temperature).exp().sum()",
        diagnosis="exp of a large logit overflows: take the largest off first",
        killed_by="test_ex08_1_temperature_comes_first_and_nothing_overflows",
    ),
    Mutant(
        "ex08_1_m7_equal_to_the_last_kept_is_kept",
        "8.1",
        old="    kept[keep] = p[keep]",
        new="    keep = p >= p[keep].min()\n    kept[keep] = p[keep]",
        diagnosis="a threshold on p keeps all tokens that are equal to the last one: decide by "
        "place in the order, not by value",
        killed_by="test_ex08_1_of_equals_the_lower_ids_stay",
    ),
    Mutant(
        "ex08_1_m8_sorted_by_p",
        "8.1",
        old="torch.sort(logits, descending=True, stable=True)",
        new="torch.sort(p, descending=True, stable=True)",
        diagnosis="the order is that of p: at a high temperature p is equal where logits are not",
        killed_by="test_ex08_1_temperature_comes_first_and_nothing_overflows",
    ),
    Mutant(
        "ex08_1_m9_left_in_falling_order",
        "8.1",
        old="kept[keep] = p[keep]",
        new="kept[: len(keep)] = p[keep]",
        diagnosis="probabilities come back in falling order: carry each back to its token's place",
        killed_by="test_ex08_1_the_token_that_crosses_stays",
    ),
    Mutant(
        "ex08_1_m10_temperature_ignored",
        "8.1",
        old="p = (scores / temperature).softmax(-1)",
        new="p = scores.softmax(-1)",
        diagnosis="the temperature changes nothing: divide the logits by it",
        killed_by="test_ex08_1_temperature_comes_first_and_nothing_overflows",
    ),
    Mutant(
        "ex08_2_m1_repetition_forgets_the_prompt",
        "8.2",
        old="for token in {*prompt, *output}:",
        new="for token in set(output):",
        diagnosis="the repetition penalty looks at prompt and output",
        killed_by="test_ex08_2_repetition_looks_at_prompt_and_output",
    ),
    Mutant(
        "ex08_2_m2_presence_counts_the_prompt",
        "8.2",
        old="""    for token in set(output):
        result[token] -= presence + frequency * output.count(token)""",
        new="""    for token in {*prompt, *output}:
        result[token] -= presence + frequency * (prompt + output).count(token)""",
        diagnosis="presence and frequency look at the output alone",
        killed_by="test_ex08_2_presence_and_frequency_look_at_the_output",
    ),
    Mutant(
        "ex08_2_m3_negative_logits_divided",
        "8.2",
        old="score / repetition if score > 0 else score * repetition",
        new="score / repetition",
        diagnosis="dividing a negative logit raises it: multiply it instead",
        killed_by="test_ex08_2_signs_repeats_and_masks",
    ),
    Mutant(
        "ex08_2_m4_once_per_occurrence",
        "8.2",
        old="for token in {*prompt, *output}:",
        new="for token in [*prompt, *output]:",
        diagnosis="repetition is applied once to a token, however often it occurs",
        killed_by="test_ex08_2_signs_repeats_and_masks",
    ),
    Mutant(
        "ex08_2_m5_frequency_does_not_count",
        "8.2",
        old="frequency * output.count(token)",
        new="frequency",
        diagnosis="frequency is subtracted once for each occurrence in the output",
        killed_by="test_ex08_2_presence_and_frequency_look_at_the_output",
    ),
    Mutant(
        "ex08_2_m6_logits_changed_in_place",
        "8.2",
        old="result = logits.clone()",
        new="result = logits",
        diagnosis="the logits that were given are changed: work on a copy",
        killed_by="test_ex08_2_repetition_looks_at_prompt_and_output",
    ),
    Mutant(
        "ex08_2_m7_presence_per_occurrence",
        "8.2",
        old="presence + frequency * output.count(token)",
        new="(presence + frequency) * output.count(token)",
        diagnosis="presence is subtracted once, however often the token occurs",
        killed_by="test_ex08_2_presence_and_frequency_look_at_the_output",
    ),
    Mutant(
        "ex08_2_m8_frequency_counts_the_prompt",
        "8.2",
        old="frequency * output.count(token)",
        new="frequency * [*prompt, *output].count(token)",
        diagnosis="frequency counts occurrences in the prompt, too: it looks at the output alone",
        killed_by="test_ex08_2_presence_and_frequency_look_at_the_output",
    ),
    Mutant(
        "ex08_2_m9_repetition_last",
        "8.2",
        old="""    for token in {*prompt, *output}:
        score = result[token]
        result[token] = score / repetition if score > 0 else score * repetition
    for token in set(output):
        result[token] -= presence + frequency * output.count(token)
""",
        new="""    for token in set(output):
        result[token] -= presence + frequency * output.count(token)
    for token in {*prompt, *output}:
        score = result[token]
        result[token] = score / repetition if score > 0 else score * repetition
""",
        diagnosis="repetition is applied after presence and frequency: it comes first",
        killed_by="test_ex08_2_signs_repeats_and_masks",
    ),
    Mutant(
        "ex08_3_m1_partial_characters_shown",
        "8.3",
        old='if not text or text.endswith("\\ufffd"):',
        new="if not text:",
        diagnosis="an unfinished character is shown as � instead of being held back",
        killed_by="test_ex08_3_whole_characters_byte_by_byte",
    ),
    Mutant(
        "ex08_3_m2_each_token_alone",
        "8.3",
        old="""        shown = self.decode(self.context)
        return self.decode(self.context + self.pending)[len(shown) :]""",
        new="""        return self.decode(self.pending)""",
        diagnosis="the waiting tokens are decoded without what came before: they stand at the "
        "start of the text, where a space is dropped",
        killed_by="test_ex08_3_spaces_and_tokens_without_text",
    ),
    Mutant(
        "ex08_3_m3_nothing_becomes_context",
        "8.3",
        old='if not text or text.endswith("\\ufffd"):',
        new='if text.endswith("\\ufffd"):',
        diagnosis="a token without text becomes the context: the next one stands at the start of "
        "the text again and loses its space",
        killed_by="test_ex08_3_spaces_and_tokens_without_text",
    ),
    Mutant(
        "ex08_3_m4_cut_tail_dropped",
        "8.3",
        old="""        text = self._new_text()
        self.context, self.pending = self.pending, []
        return text
""",
        new="""        text = self._new_text()
        self.context, self.pending = self.pending, []
        return text.rstrip("\\ufffd")
""",
        diagnosis="flush drops the character that was cut: all chunks must join to decode(all ids)",
        killed_by="test_ex08_3_the_end_of_a_cut_reply",
    ),
    Mutant(
        "ex08_3_m5_whole_reply_decoded",
        "8.3",
        old="""            return ""
        self.context, self.pending = self.pending, []
        return text""",
        new="""            return ""
        self.context, self.pending = self.context + self.pending, []
        return text""",
        diagnosis="the context grows with the reply, so every token decodes all of it: keep only "
        "what became text last",
        killed_by="test_ex08_3_a_long_reply_costs_no_more_per_token",
    ),
    Mutant(
        "ex08_3_m6_flush_repeats",
        "8.3",
        old="""        text = self._new_text()
        self.context, self.pending = self.pending, []
        return text
""",
        new="""        text = self._new_text()
        return text
""",
        diagnosis="a second flush returns the held text again",
        killed_by="test_ex08_3_the_end_of_a_cut_reply",
    ),
    Mutant(
        "ex08_4_m1_stop_text_leaked",
        "8.4",
        old="(0 if free else self._longest_beginning())",
        new="0",
        diagnosis="the beginning of a stop string is shown before it is known what it becomes",
        killed_by="test_ex08_4_found_over_any_border_and_never_shown",
    ),
    Mutant(
        "ex08_4_m2_always_the_longest_stop_held",
        "8.4",
        old="(0 if free else self._longest_beginning())",
        new="(0 if free else min(len(self.text), max(map(len, self.stops), default=1) - 1))",
        diagnosis="the longest stop's length minus one is always held back, also text that no stop "
        "begins with",
        killed_by="test_ex08_4_holds_back_no_more_than_it_must",
    ),
    Mutant(
        "ex08_4_m3_text_after_the_stop",
        "8.4",
        old="            if self.hit is None:\n",
        new="            if True:\n",
        diagnosis="text goes on after a stop string was found",
        killed_by="test_ex08_4_the_end_and_a_stop_that_is_included",
    ),
    Mutant(
        "ex08_4_m4_the_longer_wins_a_tie",
        "8.4",
        old="self.hit = ends[0]",
        new="self.hit = max(ends, key=len)",
        diagnosis="of two stops that complete at one character the earlier in the list wins, not "
        "the longer",
        killed_by="test_ex08_4_the_first_to_complete_wins_then_the_list",
    ),
    Mutant(
        "ex08_4_m5_include_ignored",
        "8.4",
        old="            if not self.include:\n",
        new="            if True:\n",
        diagnosis="with include=True the stop string is part of the text",
        killed_by="test_ex08_4_the_end_and_a_stop_that_is_included",
    ),
    Mutant(
        "ex08_4_m6_flush_forgets",
        "8.4",
        old="rest = self.text[self.shown :]",
        new='rest = ""',
        diagnosis="text that was held back and became no stop string must be returned at the end",
        killed_by="test_ex08_4_the_end_and_a_stop_that_is_included",
    ),
    Mutant(
        "ex08_4_m7_only_within_a_piece",
        "8.4",
        old="        start = self.shown\n        for character in text:\n            if self.hit is None:\n                self.text += character\n                self._look()\n        return self.text[start : self.shown]\n\n    def _look(self):\n        ends = [stop for stop in self.stops if self.text.endswith(stop)]\n",
        new="        start, self.piece = self.shown, len(self.text)\n        for character in text:\n            if self.hit is None:\n                self.text += character\n                self._look()\n        return self.text[start : self.shown]\n\n    def _look(self):\n        ends = [stop for stop in self.stops if self.text[self.piece :].endswith(stop)]\n",
        diagnosis="a stop string that spans two pieces is missed: remember the end of the text",
        killed_by="test_ex08_4_found_over_any_border_and_never_shown",
    ),
    Mutant(
        "ex08_4_m8_restarts_at_a_mismatch",
        "8.4",
        old="for length in range(len(stop))",
        new="for length in (0, 1, len(self.text) - self.shown)",
        diagnosis="after a mismatch the match starts again at the next character: in 'aaab' the "
        "stop 'aab' has begun one character earlier",
        killed_by="test_ex08_4_found_over_any_border_and_never_shown",
    ),
    Mutant(
        "ex08_4_m9_first_in_the_list_anywhere",
        "8.4",
        old="        start = self.shown\n",
        new="        start, whole = self.shown, self.text + text\n        for stop in self.stops:\n            if self.hit is None and stop in whole:\n                self.hit = stop\n                self.text = whole[: whole.index(stop) + len(stop) * self.include]\n                self.shown = len(self.text)\n",
        diagnosis="the pieces are searched for one stop after the other: the one that completes "
        "first in the text must win",
        killed_by="test_ex08_4_the_first_to_complete_wins_then_the_list",
    ),
    Mutant(
        "ex08_5_m1_one_generator_for_all",
        "8.5",
        old='random.Random(f"{seed} {index}")',
        new='globals().setdefault("SHARED", random.Random(0))',
        diagnosis="one generator serves all rows: a token depends on who drew before",
        killed_by="test_ex08_5_a_function_of_row_seed_and_index",
    ),
    Mutant(
        "ex08_5_m2_seed_plus_index",
        "8.5",
        old='random.Random(f"{seed} {index}")',
        new="random.Random(seed + index)",
        diagnosis="seed and index are added: seed 5 at index 3 repeats seed 4 at index 4",
        killed_by="test_ex08_5_seed_and_index_are_not_mixed_up",
    ),
    Mutant(
        "ex08_5_m3_index_ignored",
        "8.5",
        old='random.Random(f"{seed} {index}")',
        new="random.Random(seed)",
        diagnosis="every draw of a request uses the same randomness: the index must count",
        killed_by="test_ex08_5_seed_and_index_are_not_mixed_up",
    ),
    Mutant(
        "ex08_5_m4_global_generator_seeded",
        "8.5",
        old='        own = random.Random(f"{seed} {index}")\n',
        new='        own = random\n        random.seed(f"{seed} {index}")\n',
        diagnosis="the global generator is seeded: it belongs to the caller",
        killed_by="test_ex08_5_the_callers_generators_are_left_alone",
    ),
    Mutant(
        "ex08_5_m5_one_generator_a_batch",
        "8.5",
        old='random.Random(f"{seed} {index}")',
        new='locals().get("own") or random.Random(f"{seed} {index}")',
        diagnosis="the first row's generator serves the whole batch: a token depends on its place",
        killed_by="test_ex08_5_a_function_of_row_seed_and_index",
    ),
    Mutant(
        "ex08_5_m6_written_without_a_space",
        "8.5",
        old='f"{seed} {index}"',
        new='f"{seed}{index}"',
        diagnosis="seed 12, index 34 and seed 123, index 4 make the same text: separate the two",
        killed_by="test_ex08_5_seed_and_index_are_not_mixed_up",
    ),
    Mutant(
        "ex08_5_m7_equal_weights",
        "8.5",
        old="own.choices(range(len(weights)), weights)[0]",
        new="own.randrange(len(weights))",
        diagnosis="the draw ignores the logits",
        killed_by="test_ex08_5_draws_follow_the_softmax",
    ),
    Mutant(
        "ex08_5_m8_the_row_counts",
        "8.5",
        old='random.Random(f"{seed} {index}")',
        new='random.Random(f"{seed} {index} {len(tokens)}")',
        diagnosis="the row goes into the randomness: the same request draws other tokens at another "
        "place of the batch",
        killed_by="test_ex08_5_a_function_of_row_seed_and_index",
    ),
]

# Automatic changes that no test can notice.
_SORT = "nucleus: `order = torch.sort(logits, descending=True, stable=True).indices` → "
_BEFORE = "nucleus: `before = p[order].cumsum(-1) - p[order]` → "
_SOFTMAX = "nucleus: `p = (scores / temperature).softmax(-1)  # torch takes the largest off by itself` → "
_KEEP = "nucleus: `keep = order[before < top_p * (1 - 1e-6)]` → "
_ROW = "a row has one dimension: 0 and -1 are the same"
SURVIVORS = {
    _SORT + "`order = torch.sort(logits, descending=True, stable=False).indices`": (
        "lives where torch sorts stably without a promise: on processors without AVX2"
    ),
    _BEFORE + "`before = p[order].cumsum(-0) - p[order]`": _ROW,
    _SOFTMAX
    + "`p = (scores / temperature).softmax(-0)  # torch takes the largest off by itself`": _ROW,
    _KEEP + "`keep = order[before <= top_p * (1 - 1e-06)]`": (
        "they differ at one float, top_p less a millionth to the last bit"
    ),
    "penalize: `result[token] = score / repetition if score > 0 else score * repetition` → "
    "`result[token] = score / repetition if score >= 0 else score * repetition`": (
        "0 divided and 0 multiplied are 0"
    ),
    "StopMatcher._longest_beginning: `for length in range(len(stop))` → "
    "`for length in range(len(stop) + 1)`": "a whole stop at the end is a hit, found before",
    "draw_batch: `weights = row.double().softmax(-1).tolist()` → "
    "`weights = row.double().softmax(-0).tolist()`": _ROW,
    "draw_batch: `tokens.append(own.choices(range(len(weights)), weights)[0])` → "
    "`tokens.append(own.choices(range(len(weights)), weights)[(-1)])`": (
        "the first of one choice is the last"
    ),
}
