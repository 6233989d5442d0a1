"""`minifer chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from minifer.cli import session
from minifer.cli.parser import add_command, add_model_options, sampling_fields
from minifer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minifer.llm import LLM
    from minifer.outputs import RequestOutput

_ONE_TEXT = {"n", "logprobs", "prompt_logprobs", "detokenize"}  # fields that make no sense here
COMMANDS = """\
/reset          forget the conversation
/system TEXT    set the system message; without TEXT there is none
/help           show this
/exit           leave; so does ctrl-D
ctrl-C          stop the reply; what was said so far stays in the conversation"""


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "chat",
        run,
        summary="talk to a model",
        about="A conversation. Every turn sends all of it to the model again; the prefix cache "
        "finds the KV of what was there before, so that only the new tokens are computed (see "
        "--stats). When it grows beyond the model's context, the oldest turns are forgotten.",
        examples=[
            ("chat", "the default model; /help shows what you can type"),
            ('chat --system "Answer in French." --temperature 0.7', "another tone"),
            ("chat --stats", "how many tokens of each turn came from the cache"),
        ],
        code=[
            ("minifer/text/chat_template.py", "messages become a prompt"),
            ("minifer/kv/manager.py", "finds the beginning that is already computed"),
            ("minifer/llm.py", "LLM.stream: closing it aborts the request"),
        ],
    )
    parser.add_argument("--system", metavar="TEXT", help="begin with this system message")
    parser.add_argument("--stats", action="store_true", help="print counts and times of each turn")
    add_model_options(parser, skip=_ONE_TEXT)


def run(arguments: argparse.Namespace) -> int:
    with session.open_llm(arguments) as llm:
        if not session.has_template(llm):
            raise ValueError(
                "this model has no chat template, so it cannot chat: use `minifer generate`, or "
                "an instruction-tuned model"
            )
        conversation = Conversation(llm, arguments)
        interactive = sys.stdin.isatty()
        if interactive:
            with suppress(ImportError):  # lines can be edited and called back where it exists
                importlib.import_module("readline")
            print("ctrl-C stops a reply, ctrl-D leaves, /help shows more", file=sys.stderr)
        going = True
        while going:
            try:
                line = input("> " if interactive else "").strip()
                going = obey(conversation, line)
            except EOFError:
                going = False
            except KeyboardInterrupt:  # at the prompt it drops the line
                print()
            except ValueError as error:  # refused: this turn, not the conversation
                print(f"minifer: error: {error}", file=sys.stderr)
    return 0


def obey(conversation: Conversation, line: str) -> bool:
    """Do what one line asks for; False to leave."""
    command, _, rest = line.partition(" ")
    if command == "/exit":
        return False
    if command == "/help":
        print(COMMANDS)
    elif command == "/reset":
        conversation.turns.clear()
        session.note("the conversation is empty")
    elif command == "/system":
        conversation.system = rest.strip() or None
        session.note("the system message is " + ("set" if conversation.system else "gone"))
    elif command.startswith("/"):
        raise ValueError(f"unknown command {command}: /help lists them")
    elif line:
        conversation.say(line)
    return True


class Conversation:
    """Messages so far and the model that answers them."""

    def __init__(self, llm: LLM, arguments: argparse.Namespace) -> None:
        self.llm = llm
        self.arguments = arguments
        self.system: str | None = arguments.system
        self.turns: list[dict[str, str]] = []  # user and assistant in turn

    def say(self, text: str) -> None:
        """Send a message and print the reply as it comes; ctrl-C ends it early.

        Raises `ValueError` when the message is refused; the conversation is then as before.
        """
        before = list(self.turns)
        self.turns.append({"role": "user", "content": text})
        try:
            ids, params = self._prompt()
            reply, output = self._reply(ids, params)
        except BaseException:
            self.turns = before
            raise
        self.turns.append({"role": "assistant", "content": reply})
        if (reason := session.failure(output)) is not None:
            self.turns = before
            raise ValueError(f"the request failed and is forgotten: {reason}")
        if output.finished and output.outputs[0].finish_reason == "length":
            session.note("the reply was cut at its longest; --max-tokens allows more")
        if self.arguments.stats:
            session.print_stats(self.llm, output)

    def _prompt(self) -> tuple[list[int], SamplingParams]:
        """The conversation as token ids, without its oldest turns if there is no room for them.

        An answer may fill what is left; at least a quarter of the context is left, when older
        turns can make room for it.
        """
        limits = self.llm.engine.limits
        wanted = sampling_fields(self.arguments).get("max_tokens", session.MAX_TOKENS)
        total = limits.max_total_tokens
        needed = total // 4 if wanted is None else min(wanted, total // 4)
        system = [{"role": "system", "content": self.system}] if self.system else []
        forgotten = 0
        while True:
            ids = self.llm.tokenizer.apply_chat_template(system + self.turns)
            room = total - len(ids)
            if room >= needed or len(self.turns) == 1:
                break
            del self.turns[:2]
            forgotten += 2
        if len(ids) > limits.max_prompt_len:
            raise ValueError(
                f"the message and what frames it have {len(ids)} tokens, the limit is "
                f"{limits.max_prompt_len}: shorten it"
            )
        if forgotten:
            session.note(f"the conversation is too long: its {forgotten} oldest messages are gone")
        params = session.choose_params(self.arguments, self.llm, len(ids))
        if params.max_tokens is not None:
            params = params.with_(max_tokens=min(params.max_tokens, room))
        return ids, params

    def _reply(self, ids: list[int], params: SamplingParams) -> tuple[str, RequestOutput]:
        """Print the reply; its text and its last output come back."""
        reply = ""
        with ctrl_c() as pressed, closing(self.llm.stream(ids, params)) as stream:
            for output in session.with_all_loops(stream):
                for piece in output.outputs:
                    reply += piece.text
                    print(piece.text, end="", flush=True)
                if pressed.is_set():
                    break
        if not reply.endswith("\n"):
            print()
        return reply, output


@contextmanager
def ctrl_c() -> Iterator[threading.Event]:
    """Let ctrl-C set an event, looked at between two steps: no step is torn in the middle."""
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
