"""A tokenizer that needs no training: one token a byte, 32 special tokens, 288 in all.

Token id = byte value, so a prompt's ids can be read off an ASCII table. It is a real byte-level
BPE (Radford et al. 2019, section 2.2) that has learnt no merges yet: text and ids pass through the
same library code as those of any model.
"""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from minifer.text.tokenizer import Tokenizer

VOCAB_SIZE = 288
BOS, EOS, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"  # ids 256 … 259
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte, by byte value (GPT-2's table).

    Printable Latin-1 bytes stand for themselves; the other 68 take the characters from U+0100 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def byte_tokenizer(add_bos_token: bool = False) -> Tokenizer:
    """The 288-token tokenizer with a ChatML template. `save` it to get its tokenizer.json.

    Ids 0 … 255 are the bytes; 256 … 259 begin and end a text and a chat message; the rest is
    reserved. add_bos_token: begin every text with `<|bos|>`.
    """
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = [BOS, EOS, IM_START, IM_END]
    special += [f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - 256 - len(special))]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return Tokenizer(
        backend,
        special_tokens={"bos_token": BOS, "eos_token": EOS},
        chat_template=CHATML_TEMPLATE,
        add_bos_token=add_bos_token,
    )
