"""Text to token ids and back: the `tokenizers` library, plus what a checkpoint says around it.

A checkpoint's `tokenizer.json` holds the algorithm; `tokenizer_config.json`, `special_tokens_map`
and `chat_template.jinja` say which token begins and ends a text and how a conversation is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from minifer.text.chat_template import ChatTemplate, Message

LONG_TEXT = 4096  # characters; takes milliseconds to encode
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """What the engine asks of a tokenizer.

    backend_tokenizer: the `tokenizers.Tokenizer` underneath, for incremental decoding and
    grammars. special_tokens: text of the named special tokens (`{"bos_token": "<s>", …}`), which
    the chat template reads too. add_bos_token, add_eos_token: begin and end every text with the
    token of that name; None keeps what the backend does.
    """

    def __init__(
        self,
        backend_tokenizer: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        add_bos_token: bool | None = None,
        add_eos_token: bool | None = None,
    ) -> None:
        self.backend_tokenizer = backend_tokenizer
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        # A saved limit would cut long prompts in silence.
        backend_tokenizer.no_truncation()
        backend_tokenizer.no_padding()
        if add_bos_token is not None or add_eos_token is not None:
            backend_tokenizer.post_processor = self._frame(bool(add_bos_token), bool(add_eos_token))
        framed = backend_tokenizer.encode("").ids
        self._adds_bos = framed[:1] == [self.bos_token_id]

    def _frame(self, bos: bool, eos: bool) -> TemplateProcessing:
        """A post-processor that puts the begin and end tokens around a text."""
        parts = ["$A"]
        tokens = []
        if bos and self.bos_token_id is not None:
            parts.insert(0, self.special_tokens["bos_token"])
            tokens.append((self.special_tokens["bos_token"], self.bos_token_id))
        if eos and self.eos_token_id is not None:
            parts.append(self.special_tokens["eos_token"])
            tokens.append((self.special_tokens["eos_token"], self.eos_token_id))
        return TemplateProcessing(single=parts, special_tokens=tokens)

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Read a checkpoint folder. Raises `ValueError` naming the file that is missing or bad.

        Whether BOS is added is what tokenizer.json says; like transformers 5, `add_bos_token` of
        tokenizer_config.json is not asked.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"no tokenizer.json in {folder}: minifer reads the `tokenizers` format only; save "
                "it with transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file} is not a readable tokenizer: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
        return cls(
            backend,
            special_tokens=special,
            chat_template=_read_template(folder, config),
        )

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into a folder; `from_dir` reads them."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend_tokenizer.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it become their ids.

        add_special_tokens: begin with BOS where the checkpoint says so. A text that already
        starts with BOS gets no second one. Raises `ValueError` for text that is not valid
        Unicode (a lone surrogate has no UTF-8 bytes).
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text is not valid Unicode: lone surrogate {text[error.start]!r} at character "
                f"{error.start}; replace it before sending"
            ) from error
        backend = self.backend_tokenizer
        if len(text) < LONG_TEXT:
            ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # the library lets other threads run only while it encodes a batch
            (encoded,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = encoded.ids
        if add_special_tokens and self._adds_bos and ids[1:2] == [self.bos_token_id]:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids: bytes that are no UTF-8 become U+FFFD, spaces stay as they are.

        An id beyond the vocabulary has no text: models pad their embedding. Raises `ValueError`
        for a negative id.
        """
        try:
            return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens))
        except OverflowError as error:
            wrong = next(i for i in ids if not 0 <= i < 2**32)
            raise ValueError(f"token ids must be in [0, 2**32), got {wrong}") from error

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token ("Ġhello"), None outside the vocabulary."""
        return self.backend_tokenizer.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        return self.backend_tokenizer.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included. A model's V may be larger."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)

    @cached_property
    def _compiled_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise ValueError(
                "this model has no chat template: send a prompt instead of messages, or use an "
                "instruction-tuned checkpoint"
            )
        return ChatTemplate(self.chat_template)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """A conversation as prompt text; arguments and errors as in `ChatTemplate.render`."""
        return self._compiled_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(self.special_tokens | variables),
        )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation. The template writes BOS itself, so none is added here."""
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **variables,
        )
        return self.encode(text, add_special_tokens=False)


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty when the file is not there."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens: each a string, or an object with its text under `content`."""
    named = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the template in tokenizer_config.json (of several: "default")."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
