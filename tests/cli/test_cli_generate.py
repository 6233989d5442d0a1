"""`minifer generate`: what is printed where, and with which exit status."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_model import ABC, write_model

from minifer import LLM, SamplingParams
from minifer.cli import main, session

Capture = pytest.CaptureFixture[str]
MINIFER = shutil.which("minifer", path=Path(sys.executable).parent)


def generate(folder: Path, *arguments: str) -> int:
    return main(["generate", *arguments, "--model", str(folder), *ABC])


def without_template(folder: Path, target: Path) -> Path:
    """A copy of a model that does not know how to chat."""
    shutil.copytree(folder, target)
    file = target / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["chat_template"]
    file.write_text(json.dumps(config))
    return target


def test_prints_what_the_library_generates_and_nothing_else(
    model_folder: Path, capsys: Capture
) -> None:
    assert generate(model_folder, "hello", "--max-tokens", "12") == 0
    out, err = capsys.readouterr()
    with LLM(str(model_folder)) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, allowed_token_ids=(97, 98, 99))
        (answer,) = llm.chat([{"role": "user", "content": "hello"}], params)
    assert out == answer.outputs[0].text + "\n"
    assert len(out) == 13 and set(out) <= set("abc\n")
    assert err == ""


def test_the_compiled_step_gives_the_same_tokens(capsys: Capture) -> None:
    arguments = ["generate", "The with statement", "--model", "minifer-tiny", "--max-tokens", "12"]
    assert main(arguments) == 0
    expected = capsys.readouterr().out
    assert main([*arguments, "--backend", "compiled"]) == 0
    assert capsys.readouterr().out == expected


def test_without_a_compiler_one_line_says_so_and_torch_answers(
    tmp_path: Path,
) -> None:
    arguments = ["generate", "The", "--model", "minifer-tiny", "--max-tokens", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "minifer", *arguments, "--backend", "compiled"],
        env=os.environ | {"CXX": str(tmp_path / "c++")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and len(done.stdout) == 5
    (line,) = done.stderr.splitlines()
    assert line.startswith("minifer: warning: CXX names") and "running in torch" in line


def test_what_the_compiled_step_cannot_run_is_a_sentence(
    model_folder: Path, capsys: Capture
) -> None:
    assert generate(model_folder, "hello", "--backend", "compiled") == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert "head_dim that is a multiple of 16, got 8" in err


def test_interpreted_kernels_give_the_same_tokens_and_say_why_they_are_slow(
    model_folder: Path, capsys: Capture
) -> None:
    arguments = ("hello", "--max-tokens", "3")
    assert generate(model_folder, *arguments) == 0
    expected = capsys.readouterr().out
    assert generate(model_folder, *arguments, "--backend", "megakernel") == 0
    out, err = capsys.readouterr()
    assert out == expected
    assert "Triton's interpreter" in err and "--backend torch" in err


def test_raw_sends_the_prompt_as_it_is(model_folder: Path, capsys: Capture) -> None:
    generate(model_folder, "hello", "--json", "--raw", "--max-tokens", "1")
    assert json.loads(capsys.readouterr().out)["prompt_token_ids"] == list(b"hello")


def test_a_model_without_template_gets_the_bare_prompt(
    model_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = without_template(model_folder, tmp_path / "model")
    assert generate(folder, "hello", "--json", "--max-tokens", "1") == 0
    assert json.loads(capsys.readouterr().out)["prompt_token_ids"] == list(b"hello")
    assert generate(folder, "hello", "--system", "be brief") == 2
    assert "this model has no chat template" in capsys.readouterr().err


def test_system_comes_before_the_prompt(model_folder: Path, capsys: Capture) -> None:
    generate(model_folder, "hello", "--system", "be brief", "--json", "--max-tokens", "1")
    ids = json.loads(capsys.readouterr().out)["prompt_token_ids"]
    text = bytes(token for token in ids if token < 256).decode()
    assert text == "system\nbe brief\nuser\nhello\nassistant\n"
    assert generate(model_folder, "hello", "--system", "be brief", "--raw") == 2
    assert "--raw sends the prompt as it is" in capsys.readouterr().err


def test_a_dash_reads_standard_input(
    model_folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    generate(model_folder, "-", "--raw", "--json", "--max-tokens", "1")
    described = json.loads(capsys.readouterr().out)
    assert described["prompt"] == "two\nlines"
    assert described["prompt_token_ids"] == list(b"two\nlines")


def test_several_answers_come_one_after_the_other(model_folder: Path, capsys: Capture) -> None:
    arguments = ("hello", "--n", "2", "--temperature", "1", "--max-tokens", "5", "--seed", "3")
    assert generate(model_folder, *arguments) == 0
    first, a, second, b = capsys.readouterr().out.splitlines()
    assert (first, second) == ("--- 1 of 2 (length)", "--- 2 of 2 (length)")
    assert len(a) == len(b) == 5 and a != b


def test_json_holds_the_whole_answer(model_folder: Path, capsys: Capture) -> None:
    arguments = ("hello", "--raw", "--json", "--max-tokens", "4", "--logprobs", "2")
    assert generate(model_folder, *arguments, "--prompt-logprobs", "0") == 0
    out, err = capsys.readouterr()
    described = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    (answer,) = described["outputs"]
    assert answer["text"] == bytes(answer["token_ids"]).decode()
    assert (answer["finish_reason"], answer["stop_reason"]) == ("length", None)
    assert described["usage"] == {
        "prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 4, "total_tokens": 9,
    }  # fmt: skip
    for token, position in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert position[0]["token_id"] == token and position[0]["token"] == chr(token)
        assert position[0]["logprob"] <= 0 and position[0]["rank"] >= 1
    total = sum(position[0]["logprob"] for position in answer["logprobs"])
    assert answer["cumulative_logprob"] == pytest.approx(total)
    nothing, *scored = described["prompt_logprobs"]
    assert nothing is None
    assert [position[0]["token_id"] for position in scored] == list(b"ello")
    assert described["metrics"]["ttft"] > 0 and described["metrics"]["load_time"] > 0
    assert err == ""


def test_json_spells_minus_infinity_as_null(
    model_folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that rules a token out: its log-probability is −∞, which JSON cannot say."""
    from minifer.execution.runner import ModelRunner

    forward = ModelRunner.forward

    def ruled_out(runner, batch):
        logits = forward(runner, batch).clone()
        logits[:, 50] = float("-inf")
        return logits

    monkeypatch.setattr(ModelRunner, "forward", ruled_out)
    generate(model_folder, "hello", "--json", "--max-tokens", "1", "--logprobs", "-1")
    out = capsys.readouterr().out
    described = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    (position,) = described["outputs"][0]["logprobs"]
    assert {e["logprob"] for e in position if e["token_id"] == 50} == {None}
    assert all(e["logprob"] < 0 for e in position if e["token_id"] != 50)


def test_what_plain_text_cannot_show_asks_for_json(model_folder: Path, capsys: Capture) -> None:
    for arguments in (["--logprobs", "1"], ["--prompt-logprobs", "0"], ["--no-detokenize"]):
        assert generate(model_folder, "hello", *arguments) == 2
        assert "add --json" in capsys.readouterr().err


def test_stats_go_to_standard_error(model_folder: Path, capsys: Capture) -> None:
    assert generate(model_folder, "hi", "--raw", "--stats", "--max-tokens", "3") == 0
    out, err = capsys.readouterr()
    assert len(out) == 4
    rows = dict(line.split(maxsplit=1) for line in err.splitlines())
    assert rows["prompt"] == "2 tokens, 0 cached"
    assert rows["answer"] == "3 tokens, finish_reason length"
    assert rows.keys() == {"prompt", "answer", "load", "TTFT", "TPOT"}


def test_stats_tell_what_came_from_the_tiers_and_which_guard_rang(
    model_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    ask = (model_folder, "x" * 64, "--raw", "--stats", "--kv-load-policy", "always", "--max-tokens")
    tiers = ("--kv-dram-bytes", "1000000", "--kv-disk-path", str(tmp_path / "blocks"))
    for found in (0, 48):  # the last block is computed, for its logits
        assert generate(*ask, "1", *tiers) == 0
        err = capsys.readouterr().err
        assert f"tiers   tokens loaded so far: 0 from dram, {found} from disk\n" in err
    assert generate(*ask, "100", "--logit-bias", "97=100") == 0
    assert "guards  alarms so far: repetition 1\n" in capsys.readouterr().err


def test_the_default_length_shrinks_to_what_fits_and_says_so(
    model_folder: Path, capsys: Capture
) -> None:
    assert generate(model_folder, "x" * 500, "--raw", "--ignore-eos") == 0
    out, err = capsys.readouterr()
    assert len(out) == 12 + 1
    assert err == "minifer: note: max_tokens is 12: the prompt takes the other 500\n"


def test_a_request_that_fails_in_the_engine_is_a_failure(
    model_folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minifer.execution.runner import ModelRunner

    def broken(runner, batch):
        raise OSError("the device is on fire")

    monkeypatch.setattr(ModelRunner, "forward", broken)
    assert generate(model_folder, "hello") == 1
    err = capsys.readouterr().err
    assert err == "minifer: error: the request failed: OSError: the device is on fire\n"


# -- as a process


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    assert MINIFER is not None, "the minifer command is not installed beside this Python"
    return subprocess.run(
        [MINIFER, *arguments], env=os.environ | environment, capture_output=True, text=True
    )


def test_before_a_pull_the_bundled_model_answers_with_a_notice(tmp_path: Path) -> None:
    done = process("generate", "The for statement", "--max-tokens", "8", MINIFER_HOME=str(tmp_path))
    assert done.returncode == 0
    assert len(done.stdout.strip()) > 0
    assert done.stderr.startswith("minifer: note: ") and "`minifer pull`" in done.stderr
    assert done.stderr.count("\n") == 1


def test_errors_of_a_process_have_status_and_one_sentence() -> None:
    sentence = "minifer: error: top_p must be a number in (0, 1], got 2.0\n"
    done = process("generate", "hi", "--top-p", "2")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)
    done = process("generate", "hi", "--top-p", "2", MINIFER_DEBUG="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Traceback") and done.stderr.endswith(sentence)


def test_a_reader_that_leaves_early_is_no_error(model_folder: Path) -> None:
    command = (
        f"{MINIFER} generate hi --ignore-eos --model {model_folder} {' '.join(ABC)} | head -c 1"
    )
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert len(done.stdout) == 1
    assert done.stderr == ""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_ends_quietly_with_130(tmp_path: Path) -> None:
    import signal

    folder = write_model(tmp_path, max_position_embeddings=100_000)
    command = [MINIFER, "generate", "hi", "--max-tokens", "none", "--ignore-eos", *ABC]
    command += ["--model", str(folder), "--num-kv-blocks", "6000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.read(1)  # it has begun to answer
        running.send_signal(signal.SIGINT)
        out, err = running.communicate()
    assert running.returncode == 130
    assert err == b""
    assert len(out) < 90_000


def test_only_triton_kernels_are_said_to_be_interpreted(capsys: Capture) -> None:
    from minifer.kernels.compat import INTERPRETED  # not where there is a GPU

    for backend in ("torch", "compiled", "triton", "megakernel"):
        session.note_interpreter(backend)
        kernels = backend in ("triton", "megakernel") and INTERPRETED.value
        assert ("Triton's interpreter" in capsys.readouterr().err) == kernels, backend
