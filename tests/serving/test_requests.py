"""What a request may say: prompts, limits, echo, chat templates. Case by case."""

from __future__ import annotations

import pytest
from live import Live, live, user

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""]])
def test_case_106_an_empty_prompt_is_refused_and_the_engine_lives(server: Live, prompt):
    error = server.refusal(prompt=prompt)
    assert "1" in error["message"]
    assert server.complete("a", max_tokens=1)["usage"]["completion_tokens"] == 1


LENGTHS = [
    ({"prompt": ""}, "the prompt must hold at least 1 token, got 0"),
    ({"prompt": []}, "prompt must hold 1 to 64 prompts, got 0"),
    ({"prompt": "a" * 1024}, "the prompt has 1024 tokens, the limit is 1023"),
    (
        {"prompt": "a" * 1000, "max_tokens": 25},
        "the prompt has 1000 tokens and max_tokens is 25, together 1025; the model's limit is 1024",
    ),
]


@pytest.mark.parametrize(("body", "message"), LENGTHS)
def test_case_107_and_110_lengths_are_refused_with_exact_numbers(server: Live, body, message):
    error = server.refusal(**body)
    assert error["message"].startswith(message)
    assert error["code"] == ("context_length_exceeded" if len(body["prompt"]) > 9 else None)


def test_case_107_the_longest_that_fits_is_taken(server: Live):
    answer = server.complete("a" * 1000, max_tokens=24, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 1024


def test_case_109_no_tokens_is_refused_but_to_score_a_prompt(server: Live):
    assert server.refusal(prompt="a", max_tokens=0)["param"] == "max_tokens"
    assert server.refusal(CHAT, messages=user("a"), max_tokens=0)["param"] == "max_tokens"
    answer = server.complete("abc", max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("prompt", [[97, 98], [[97, 98]], ["ab"]])
def test_a_prompt_has_four_forms(server: Live, prompt):
    assert (
        server.complete(prompt, max_tokens=6)["choices"]
        == (server.complete("ab", max_tokens=6)["choices"])
    )


@pytest.mark.parametrize("prompt", [["a", 1], [1.0], [True], [["a"]], {"a": 1}, 5, [[1], "a"]])
def test_other_forms_of_a_prompt_are_refused(server: Live, prompt):
    assert server.refusal(prompt=prompt)["param"] == "prompt"


def test_a_token_id_beyond_the_vocabulary_is_refused(server: Live):
    assert "288" in server.refusal(prompt=[97, 288])["message"]
    assert "288" in server.refusal(prompt=[97, -1], echo=True)["message"]


def test_one_bad_prompt_of_several_refuses_all(server: Live):
    server.refusal(prompt=["a", "b", "a" * 2000])
    server.wait_until_idle()


def test_echo_shows_the_prompt_with_its_logprobs(server: Live):
    plain = server.complete("The for", max_tokens=5, logprobs=2)["choices"][0]
    echo = server.complete("The for", max_tokens=5, logprobs=2, echo=True)["choices"][0]
    assert echo["text"] == "The for" + plain["text"]
    assert "".join(echo["logprobs"]["tokens"]) == echo["text"]
    assert echo["logprobs"]["text_offset"] == list(range(12))
    assert echo["logprobs"]["token_logprobs"][7:] == pytest.approx(
        plain["logprobs"]["token_logprobs"], abs=1e-4
    )
    scored = server.complete("The for", max_tokens=1, prompt_logprobs=0)["choices"][0]
    expected = [next(iter(p.values()))["logprob"] for p in scored["prompt_logprobs"][1:]]
    assert echo["logprobs"]["token_logprobs"][1:7] == pytest.approx(expected, abs=1e-4)


def test_a_stream_with_echo_and_logprobs_joins_to_the_whole(server: Live):
    fields = {"prompt": ["The for", "if"], "max_tokens": 5, "logprobs": 1, "temperature": 0}
    whole = server.complete(**fields, echo=True)["choices"]
    chunks = server.stream("/v1/completions", **fields, echo=True)
    for choice in whole:
        pieces = [
            piece
            for chunk in chunks
            for piece in chunk["choices"]
            if piece["index"] == choice["index"]
        ]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for key in choice["logprobs"]:
            joined = [value for piece in pieces for value in piece["logprobs"][key]]
            assert joined == choice["logprobs"][key]


def test_offsets_of_characters_made_of_several_tokens(server: Live):
    """A byte a token: all bytes of 👋 begin where it begins; a special token takes no room."""
    logprobs = server.complete("é👋a", max_tokens=0, echo=True, logprobs=0)["choices"][0][
        "logprobs"
    ]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1, 1, 2]


BROKEN = [[240, 159, 142, 97], [159, 142, 97, 240], [224, 128, 97], [240, 240, 195, 169], [195, 97]]


@pytest.mark.parametrize("ids", BROKEN)
def test_offsets_where_bytes_are_no_characters(server: Live, ids: list[int]):
    """Python's own decoder is the truth; bytes that are no character show as U+FFFD."""
    choice = server.complete(ids, max_tokens=0, echo=True, logprobs=0)["choices"][0]
    assert choice["text"] == bytes(ids).decode(errors="replace")
    for position, offset in enumerate(choice["logprobs"]["text_offset"]):
        before = bytes(ids[:position]).decode(errors="replace")
        through = bytes(ids[: position + 1]).decode(errors="replace")
        assert offset == len(before) - (len(through) == len(before))


def test_a_mask_does_not_make_json_infinite(server: Live):
    """Logprobs are of the raw logits; a token that cannot be drawn is −9999 at the lowest."""
    response = server.post(
        "/v1/completions", prompt="a", max_tokens=2, logprobs=5, allowed_token_ids=[97]
    )
    assert response.status_code == 200 and "Infinity" not in response.text


def test_case_117_continue_and_begin_exclude_each_other(server: Live):
    messages = [*user("hi"), {"role": "assistant", "content": "The for statement"}]
    both = {"add_generation_prompt": True, "continue_final_message": True}
    assert "exclude" in server.refusal(CHAT, messages=messages, **both)["message"]
    only = {"add_generation_prompt": False, "continue_final_message": True}
    assert "last message" in server.refusal(CHAT, messages=user("hi"), **only)["message"]


def test_case_117_the_prefix_is_continued(server: Live):
    """The reply is what follows the text of the last message, not a new message."""
    messages = [*user("hi"), {"role": "assistant", "content": "The for statement"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    tokens = server.post("/tokenize", messages=messages, **options).json()["tokens"]
    text = server.post("/detokenize", tokens=tokens).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\nThe for statement")
    reply = server.post(CHAT, messages=messages, max_tokens=8, temperature=0, **options).json()
    same = server.complete(tokens, max_tokens=8)
    assert server.post("/tokenize", messages=messages, continue_final_message=True).json()[
        "tokens"
    ] == (tokens)
    assert reply["choices"][0]["message"]["content"] == same["choices"][0]["text"]


def test_case_118_a_template_writes_bos_and_the_tokenizer_adds_none(tmp_path):
    from fakes import tiny_config, tiny_model

    from minifer.async_llm import AsyncLLM
    from minifer.text.byte_tokenizer import byte_tokenizer
    from minifer.weights.hf import save_hf

    config = tiny_config(vocab_size=288, max_position_embeddings=256)
    save_hf(tmp_path, tiny_model(config), config)
    tokenizer = byte_tokenizer(add_bos_token=True)
    tokenizer.chat_template = "{{ bos_token }}" + (tokenizer.chat_template or "")
    tokenizer.save(tmp_path)
    server = Live(AsyncLLM(str(tmp_path), num_kv_blocks=64))
    try:
        tokens = server.post("/tokenize", messages=user("hi")).json()["tokens"]
        assert tokens.count(256) == 1 and tokens[0] == 256
        reply = server.post(CHAT, messages=user("hi"), max_tokens=1, return_token_ids=True).json()
        assert reply["prompt_token_ids"] == tokens
        plain = server.post("/tokenize", prompt="hi").json()
        assert plain["tokens"] == [256, *b"hi"] and plain["count"] == 3
        bare = server.post("/tokenize", prompt="hi", add_special_tokens=False).json()
        assert bare["tokens"] == [*b"hi"]
        echo = server.complete("hi", max_tokens=0, echo=True, logprobs=0)["choices"][0]
        assert echo["text"] == "hi"
        assert echo["logprobs"]["text_offset"] == [0, 0, 1]  # BOS is not in the text
    finally:
        server.close()


def test_tokenize_and_detokenize_are_inverse(server: Live):
    answer = server.post("/tokenize", prompt="é<|im_end|>", return_token_strs=True).json()
    assert answer["tokens"] == [0xC3, 0xA9, 259]
    assert answer["max_model_len"] == 1024 and answer["token_strs"][2] == "<|im_end|>"
    assert server.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": "é<|im_end|>"}
    assert server.refusal("/detokenize", tokens=[288])["param"] == "tokens"
    assert server.refusal("/tokenize", prompt="a", messages=user("b"))["param"] == "prompt"
    assert server.refusal("/tokenize")["param"] == "prompt"


def test_text_parts_are_joined_and_images_refused_by_name(server: Live):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert server.chat(parts)["choices"] == server.chat("a\nb")["choices"]
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    error = server.refusal(CHAT, messages=user([image]))
    assert "image_url" in error["message"] and error["param"] == "messages[0].content[0]"


BAD_MESSAGES = [
    [],
    [{}],
    [{"role": "user"}],
    [{"role": 5, "content": "a"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [5]}],
    [{"role": "tool", "content": "a", "tool_call_id": [1]}],
    [{"role": "assistant", "tool_calls": "a"}],
    [{"role": "assistant", "tool_calls": [5]}],
    [{"role": "assistant", "tool_calls": [{"id": {}, "function": {"name": "f"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 99999}}]}],
]


@pytest.mark.parametrize("messages", BAD_MESSAGES)
def test_bad_messages_are_refused(server: Live, messages):
    server.refusal(CHAT, messages=messages)


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "self", "not a name"]
)
def test_a_templates_variables_cannot_replace_the_conversation(server: Live, name):
    error = server.refusal(CHAT, messages=user("a"), chat_template_kwargs={name: "x"})
    assert error["param"] == "chat_template_kwargs"


def test_a_chat_without_a_limit_fills_the_context():
    with live({"max_model_len": 64}) as server:
        reply = server.post(CHAT, messages=user("hi"), temperature=0, ignore_eos=True).json()
        assert reply["usage"]["total_tokens"] == 64
        assert reply["choices"][0]["finish_reason"] == "length"


def test_max_tokens_has_two_names_in_a_chat(server: Live):
    for name in ("max_tokens", "max_completion_tokens"):
        reply = server.post(CHAT, messages=user("hi"), **{name: 3}).json()
        assert reply["usage"]["completion_tokens"] == 3
    both = {"max_tokens": 3, "max_completion_tokens": 4}
    assert server.refusal(CHAT, messages=user("hi"), **both)["param"] == "max_completion_tokens"


def test_a_refusal_names_the_field_that_was_sent(server: Live):
    chat = {"messages": user("hi")}
    for value in (0, -1, 5000):
        error = server.refusal(CHAT, **chat, max_completion_tokens=value)
        assert error["param"] == "max_completion_tokens"
        assert server.refusal(CHAT, **chat, max_tokens=value)["param"] == "max_tokens"
    assert server.refusal(prompt=[[97], []])["param"] == "prompt"
    assert server.refusal(prompt=[10**9])["param"] == "prompt"
    error = server.refusal(CHAT, **chat, continue_final_message=True)
    assert error["param"] == "continue_final_message"


def test_a_developers_message_is_the_systems(server: Live):
    """A template that does not know OpenAI's newer name would drop it, or add a default system."""
    texts = []
    for role in ("developer", "system"):
        messages = [{"role": role, "content": "Be brief."}, *user("hi")]
        texts.append(server.post("/tokenize", messages=messages).json()["tokens"])
    assert texts[0] == texts[1]


FUNCTIONS = [
    {"role": "function", "name": "f", "content": "1"},
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
]


@pytest.mark.parametrize("message", FUNCTIONS)
def test_openais_old_functions_are_refused_not_dropped(server: Live, message):
    error = server.refusal(CHAT, messages=[*user("hi"), message])
    assert error["param"] == "messages[1]" and "tool" in error["message"]


def test_a_request_id_of_ones_own(server: Live):
    assert server.complete("a", request_id="mine", max_tokens=1)["id"] == "cmpl-mine"
    for bad in ("", "a" * 129, "a\nb"):
        assert server.refusal(prompt="a", request_id=bad)["param"] == "request_id"
