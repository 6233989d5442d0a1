"""The tokenizer wrapper: special tokens, BOS, saved folders, errors; transformers is the oracle."""

import json
import threading

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from minifer.text.byte_tokenizer import VOCAB_SIZE, byte_alphabet, byte_tokenizer
from minifer.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "hi"}]


def llama_like(folder, **config):
    """A checkpoint folder in Llama's manner: BOS `<s>` is added by the post-processor."""
    backend = byte_tokenizer().backend_tokenizer
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    backend.enable_truncation(8)  # as a saved training tokenizer may have it
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    bos = {"__type": "AddedToken", "content": "<s>", "special": True}
    config = {"bos_token": bos, "eos_token": "</s>"} | config
    config.setdefault("chat_template", template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_dir(folder)


def test_byte_ids_are_the_bytes():
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("Aé") == [0x41, 0xC3, 0xA9]
    assert tokenizer.vocab_size == VOCAB_SIZE == 288
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.id_to_token(287) is not None and tokenizer.id_to_token(288) is None


def test_byte_alphabet_is_the_librarys():
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    decoder = decoders.ByteLevel()
    ascii_text = [decoder.decode([char]) for char in byte_alphabet()[:128]]
    assert ascii_text == [chr(byte) for byte in range(128)]


@settings(deadline=None)
@given(st.text())
@example("a<|im_start|>")
def test_bytes_round_trip_any_unicode(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    if "<|" not in text:
        assert ids == list(text.encode())


def test_a_partial_character_decodes_to_the_replacement_character():
    tokenizer = byte_tokenizer()
    euro = list("€".encode())
    assert tokenizer.decode(euro) == "€"
    assert tokenizer.decode(euro[:2]) == "\ufffd"
    assert tokenizer.decode([*b"a", *euro[:2], *b"b"]) == "a\ufffdb"


def test_special_tokens_in_text_become_their_ids_and_are_skipped_on_request():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a<|im_end|>b")
    assert ids == [97, 259, 98]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


def test_spaces_are_not_cleaned_up():
    text = " do n't , wait .  "
    assert byte_tokenizer().decode(list(text.encode())) == text


def test_case_118_one_bos_whatever_the_prompt_starts_with(tmp_path):
    tokenizer = llama_like(tmp_path)
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("hi") == [bos, 104, 105]
    assert tokenizer.encode("<s>hi") == [bos, 104, 105]
    assert tokenizer.encode("") == [bos]
    assert tokenizer.encode("hi", add_special_tokens=False) == [104, 105]
    assert tokenizer.apply_chat_template(HELLO) == [bos, *b"[hi]"]
    assert tokenizer.encode(tokenizer.render_chat(HELLO)) == [bos, *b"[hi]"]


def test_a_tokenizer_that_adds_no_bos_keeps_the_prompts_own():
    assert byte_tokenizer().encode("<|bos|><|bos|>a") == [256, 256, 97]
    assert byte_tokenizer(add_bos_token=True).encode("<|bos|><|bos|>a") == [256, 256, 97]
    assert byte_tokenizer(add_bos_token=True).encode("a") == [256, 97]


def test_saved_truncation_and_padding_do_not_touch_prompts(tmp_path):
    assert len(llama_like(tmp_path).encode("x" * 20)) == 21


def test_begin_and_end_tokens_can_be_asked_for():
    backend = byte_tokenizer().backend_tokenizer
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    tokenizer = Tokenizer(backend, special_tokens=special, add_bos_token=True, add_eos_token=True)
    assert tokenizer.encode("hi") == [256, 104, 105, 257]


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_a_folder_reads_as_transformers_reads_it(tmp_path, config):
    transformers = pytest.importorskip("transformers")
    ours = llama_like(tmp_path, **config)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    for text in ("hi", "", "a <s> b", "Grüße 🙂", "  x  "):
        assert ours.encode(text) == theirs.encode(text)
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    rendered = theirs.apply_chat_template(HELLO, add_generation_prompt=True)
    assert ours.apply_chat_template(HELLO) == list(rendered["input_ids"])
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_a_saved_tokenizer_reads_back_and_transformers_reads_it_too(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = byte_tokenizer(add_bos_token=True)
    tokenizer.save(tmp_path)
    again = Tokenizer.from_dir(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ids = tokenizer.apply_chat_template(HELLO)
    assert again.apply_chat_template(HELLO) == ids
    assert list(theirs.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]) == ids
    assert again.encode("hé") == tokenizer.encode("hé") == [256, *"hé".encode()]
    assert again.special_tokens == tokenizer.special_tokens


def test_the_template_file_wins_and_of_several_templates_default_is_taken(tmp_path):
    several = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D{{ messages[0].content }}"},
    ]
    assert llama_like(tmp_path, chat_template=several).render_chat(HELLO) == "Dhi"
    (tmp_path / "chat_template.jinja").write_text("J{{ eos_token }}")
    assert Tokenizer.from_dir(tmp_path).render_chat(HELLO) == "J</s>"


def test_special_tokens_map_is_read_where_the_config_is_silent(tmp_path):
    byte_tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_dir(tmp_path).eos_token_id is None
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|eos|>"}}')
    assert Tokenizer.from_dir(tmp_path).eos_token_id == 257


def test_a_lone_surrogate_is_refused_not_a_crash():
    with pytest.raises(ValueError, match=r"lone surrogate .* at character 1"):
        byte_tokenizer().encode("a\ud83d")
    with pytest.raises(ValueError, match="lone surrogate"):
        byte_tokenizer().apply_chat_template([{"role": "user", "content": "\udc00"}])


def test_bad_arguments_are_named(tmp_path):
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="text must be a string, got bytes"):
        tokenizer.encode(b"hi")
    with pytest.raises(ValueError, match="got -1"):
        tokenizer.decode([1, -1])
    assert tokenizer.decode([65, 100_000]) == "A"  # beyond the vocabulary: no text
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(tokenizer.backend_tokenizer).apply_chat_template(HELLO)
    with pytest.raises(ValueError, match=r"no tokenizer.json in"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a readable tokenizer"):
        Tokenizer.from_dir(tmp_path)


def test_a_named_special_token_that_is_not_in_the_vocabulary_has_no_id():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<s>"}, add_bos_token=True)
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("a") == [0]


def test_a_long_text_has_the_same_ids_and_lets_other_threads_run(pulled_model):
    """A server encodes a megabyte while its engine goes on."""
    tokenizer = Tokenizer.from_dir(pulled_model)
    text = "The quick brown fox. é👋<|im_end|>\n" * 5_000
    expected = tokenizer.backend_tokenizer.encode(text).ids
    done, beats = threading.Event(), []

    def beat():
        while not done.wait(0.001):
            beats.append(1)

    thread = threading.Thread(target=beat)
    thread.start()
    ids = tokenizer.encode(text)
    done.set()
    thread.join()
    assert ids == expected
    assert len(beats) > 3, "no other thread ran"
