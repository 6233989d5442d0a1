"""The false-alarm study: what the default guards say about 500 clean replies of SmolLM2.

Clean means: the engine works, and the model draws at temperature 0.8. A reply may still loop; it
is read and labelled by hand. `python tests/postprocessing/guards/study.py replies.json` runs
it and writes every reply with its alarms; `test_false_alarms.py` repeats it in the slow tier.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minifer.events import ListSink
from minifer.llm import LLM
from minifer.sampling_params import SamplingParams

SEED = 20261129
NUM_REPLIES = 500
MAX_TOKENS = 128

TOPICS = (
    "the sea",
    "a coffee machine",
    "prime numbers",
    "the city of Lyon",
    "bees",
    "a train timetable",
    "chess",
    "the human heart",
    "solar panels",
    "a shopping list",
)
TASKS = (
    "Explain {} to a child.",
    "Write a long story about {}.",
    "Write a Python program about {}.",
    "Write a Markdown table with five rows and four columns about {}.",
    "Write a JSON array of ten objects about {}.",
    "List 20 facts about {}.",
    "Write a poem about {} with a refrain.",
    "Write a paragraph about {} in Spanish.",
    "Write one sentence about {} in Chinese, and one in Russian.",
    "Draw {} as ASCII art, then describe it.",
)


def conversations() -> Iterator[list[dict[str, str]]]:
    """500 of them: 100 questions, each asked five times."""
    for i in range(NUM_REPLIES):
        topic, task = TOPICS[i % 10], TASKS[i // 10 % 10]
        yield [{"role": "user", "content": task.format(topic)}]


def run(
    llm: LLM, sink: ListSink, part: range = range(NUM_REPLIES), *, greedy: bool = False
) -> list[dict[str, Any]]:
    """Question, reply and alarms of the conversations in `part`.

    llm: an engine with `guards="report"` whose events go to the sink. greedy: at temperature 0
    and twice as long, where a small model likes to loop; of the 500 only 100 differ then.
    """
    questions = [question for i, question in enumerate(conversations()) if i in part]
    temperature, length = (0.0, 2 * MAX_TOKENS) if greedy else (0.8, MAX_TOKENS)
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, seed=SEED + i) for i in part
    ]
    outputs = llm.chat(questions, params)
    alarms: dict[str, list[Any]] = {}
    for event in sink.events:
        if event.name == "guard.tripped" and event.request_id is not None:
            alarms.setdefault(event.request_id, []).append(dict(event.data))
    return [
        {
            "question": question[0]["content"],
            "reply": output.outputs[0].text,
            "token_ids": output.outputs[0].token_ids,
            "finish_reason": output.outputs[0].finish_reason,
            "alarms": alarms.get(output.request_id, []),
        }
        for question, output in zip(questions, outputs, strict=True)
    ]


def main() -> None:
    path, greedy = Path(sys.argv[1]), "--greedy" in sys.argv
    sink = ListSink()
    with LLM(max_num_seqs=32, sinks=[sink]) as llm:
        replies = run(llm, sink, range(100 if greedy else NUM_REPLIES), greedy=greedy)
    path.write_text(json.dumps(replies, ensure_ascii=False, indent=1), encoding="utf-8")
    alarmed = [reply for reply in replies if reply["alarms"]]
    print(f"{len(replies)} replies, {len(alarmed)} with an alarm")
    for reply in alarmed:
        print(f"\n## {reply['question']}\n{reply['alarms']}\n{reply['reply']}")


if __name__ == "__main__":
    main()
