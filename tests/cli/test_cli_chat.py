"""`minifer chat`: what the model gets to see, turn by turn, and what ctrl-C does."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_model import ABC, write_model

from minifer.cli import main
from minifer.engine import Engine

Chat = Any


@pytest.fixture
def chat(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Chat:
    """Type some lines; what was printed, what was noted, and the prompts the engine got."""
    prompts: list[str] = []
    admit = Engine.add_request

    def add_request(engine: Engine, name: str, ids: Any, *rest: Any, **options: Any) -> None:
        prompts.append(engine.tokenizer.decode(ids, skip_special_tokens=True))
        admit(engine, name, ids, *rest, **options)

    monkeypatch.setattr(Engine, "add_request", add_request)

    def run(lines: list[str], *options: str) -> tuple[list[str], str, list[str]]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        assert main(["chat", "--model", str(model_folder), *ABC, *options]) == 0
        out, err = capsys.readouterr()
        return out.splitlines(), err, prompts

    return run


def test_every_turn_sends_the_whole_conversation(chat: Chat) -> None:
    (one, two), err, prompts = chat(["hello", "", "and you?"], "--max-tokens", "4")
    assert len(one) == len(two) == 4
    assert prompts == [
        "user\nhello\nassistant\n",
        f"user\nhello\nassistant\n{one}\nuser\nand you?\nassistant\n",
    ]
    cut = "minifer: note: the reply was cut at its longest; --max-tokens allows more\n"
    assert err == 2 * cut


def test_the_cache_finds_the_turns_before(chat: Chat) -> None:
    _, err, _ = chat(["hello", "again"], "--max-tokens", "4", "--stats", "--block-size", "4")
    turns = [line for line in err.splitlines() if line.startswith("prompt")]
    # <|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n is 24 tokens, the reply 4; of the
    # last one no KV was needed, so of the 28 all but the last block of 4 are there.
    assert turns[0] == "prompt  24 tokens, 0 cached"
    assert turns[1].endswith(", 24 cached")


def test_reset_and_system_change_what_is_sent(chat: Chat) -> None:
    lines = ["one", "/reset", "two", "/system be kind", "three", "/system", "/reset", "four"]
    replies, _, prompts = chat(lines, "--max-tokens", "2", "--system", "hi")
    assert prompts == [
        "system\nhi\nuser\none\nassistant\n",
        "system\nhi\nuser\ntwo\nassistant\n",
        f"system\nbe kind\nuser\ntwo\nassistant\n{replies[1]}\nuser\nthree\nassistant\n",
        "user\nfour\nassistant\n",
    ]


def test_exit_leaves_and_help_helps(chat: Chat) -> None:
    out, _, prompts = chat(["/help", "/exit", "not sent"])
    assert any("/reset" in line for line in out)
    assert prompts == []


def test_an_unknown_command_is_an_error_and_the_chat_goes_on(chat: Chat) -> None:
    _, err, prompts = chat(["/rest", "hello"], "--max-tokens", "1")
    assert err.startswith("minifer: error: unknown command /rest: /help lists them\n")
    assert len(prompts) == 1


def test_a_conversation_that_outgrows_the_model_forgets_its_oldest_turns(chat: Chat) -> None:
    lines = ["a" * 200, "b" * 150, "c" * 150]  # 512 positions, a quarter of them for the reply
    replies, err, prompts = chat(lines, "--max-tokens", "4")
    assert len(replies) == 3
    assert "minifer: note: the conversation is too long: its 2 oldest messages are gone" in err
    assert prompts[1].startswith("user\n" + "a" * 200)
    assert prompts[2].startswith("user\n" + "b" * 150) and "c" * 150 in prompts[2]


def test_a_message_that_can_never_fit_is_refused_and_forgotten(chat: Chat) -> None:
    _, err, prompts = chat(["x" * 600, "hello"], "--max-tokens", "1")
    assert "the message and what frames it have 619 tokens, the limit is 511: shorten it" in err
    assert prompts == ["user\nhello\nassistant\n"]


def test_a_failed_request_is_forgotten_and_the_chat_goes_on(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minifer.execution.runner import ModelRunner

    forward = ModelRunner.forward
    faults = [OSError("smoke")]

    def once_broken(runner: ModelRunner, batch: Any) -> Any:
        if faults:
            raise faults.pop()
        return forward(runner, batch)

    monkeypatch.setattr(ModelRunner, "forward", once_broken)
    _, err, prompts = chat(["one", "two"], "--max-tokens", "1")
    assert "minifer: error: the request failed and is forgotten: OSError: smoke" in err
    assert prompts[1] == "user\ntwo\nassistant\n"


def test_fields_that_make_no_sense_in_a_chat_are_no_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option in ("--n", "--logprobs", "--prompt-logprobs", "--no-detokenize"):
        assert main(["chat", option, "2"]) == 2
        assert f"unrecognized arguments: {option}" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_in_a_terminal_ctrl_c_stops_the_reply_and_not_the_program(tmp_path: Path) -> None:
    import pexpect

    folder = write_model(tmp_path, max_position_embeddings=100_000)
    arguments = ["-c", "import sys; from minifer.cli import main; sys.exit(main())", "chat"]
    arguments += ["--model", str(folder), *ABC, "--max-tokens", "none", "--ignore-eos"]
    arguments += ["--stats", "--block-size", "4", "--num-kv-blocks", "20000"]
    with pexpect.spawn(sys.executable, arguments, timeout=60, encoding="utf-8") as terminal:
        terminal.expect("> ")
        terminal.sendintr()  # at the prompt: drops the line
        terminal.expect("> ")
        terminal.sendline("hello")
        terminal.expect("[abc]{20}")  # in the middle of a reply that would take minutes
        terminal.sendintr()
        terminal.expect(r"answer  (\d+) tokens, finish_reason None")
        said = int(terminal.match.group(1))
        assert 20 <= said < 50_000
        terminal.expect("> ")
        terminal.sendline("go on")  # what was said is part of the conversation, and cached
        terminal.expect("[abc]{20}")
        terminal.sendintr()
        terminal.expect(r"prompt  (\d+) tokens, (\d+) cached")
        prompt, cached = (int(group) for group in terminal.match.groups())
        assert prompt > 24 + said and 24 + said - 8 <= cached <= 24 + said
        terminal.expect("> ")
        terminal.sendeof()
        terminal.expect(pexpect.EOF)
    assert terminal.wait() == 0
