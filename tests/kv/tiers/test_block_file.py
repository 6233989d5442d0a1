"""One block as a file: readable by everybody, taken for another by nobody."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import tiny_config, tiny_model
from safetensors import safe_open
from tier_helpers import FORMAT, content, make_chain, numbered

from minifer.config import RopeConfig
from minifer.execution.fingerprint import kv_namespace, weights_digest
from minifer.kv.tiers.block_file import BlockFormat, namespace_digest


def test_the_safetensors_library_reads_it(tmp_path):
    import torch

    (key,) = make_chain((7, 8, 9, 10))
    tensor = torch.randn(FORMAT.shape)
    file = tmp_path / "block.safetensors"
    file.write_bytes(FORMAT.encode(key, tensor.view(torch.uint8).flatten().numpy().tobytes()))
    with safe_open(file, "pt") as opened:
        assert torch.equal(opened.get_tensor("kv"), tensor)
        assert opened.metadata()["token_ids"] == "[7, 8, 9, 10]"
        assert opened.metadata()["block"] == FORMAT.file_name(key)


def test_what_is_written_is_read():
    for key in numbered(3):
        payload = FORMAT.decode(key, bytearray(FORMAT.encode(key, content(key))))
        assert payload == content(key) and not payload.readonly


def test_a_block_is_not_another_one():
    keys = [*numbered(3), *numbered(2, start=50)]
    for key in keys:
        for other in keys:
            decoded = FORMAT.decode(other, bytearray(FORMAT.encode(key, content(key))))
            assert (decoded is not None) == (key is other)


def test_k06_every_flipped_bit_is_a_miss():
    """In every byte of the file: lengths, JSON, padding, payload."""
    key = numbered(2)[1]
    good = FORMAT.encode(key, content(key))
    for i in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[i] ^= 1 << bit
            assert FORMAT.decode(key, bad) is None, (i, bit)


def test_k06_every_truncation_and_extension_is_a_miss():
    key = numbered(2)[1]
    good = FORMAT.encode(key, content(key))
    for length in range(len(good)):
        assert FORMAT.decode(key, bytearray(good[:length])) is None
        assert FORMAT.decode(key, bytearray(good[length + 1 :])) is None
    assert FORMAT.decode(key, bytearray(good + b"\0")) is None
    assert FORMAT.decode(key, bytearray(good + good)) is None


def test_secrets_are_not_in_the_file():
    (key,) = make_chain((1, 2, 3, 4), extra=(("salt", "tenant-secret"),))
    assert b"tenant-secret" not in FORMAT.encode(key, content(key))


def names(config, weights="w", dtype="F32", shape=(4, 4, 2, 8)) -> str:
    namespace = (("config", repr(config)), ("weights", weights))
    (key,) = make_chain((1, 2, 3, 4))
    return BlockFormat(namespace, dtype, shape).file_name(key)


CHANGES = {
    "architecture": "Qwen3ForCausalLM",
    "vocab_size": 41,
    "intermediate_size": 96,
    "num_layers": 3,
    "rms_norm_eps": 1e-5,
    "rope": RopeConfig(theta=1e5),
    "sliding_windows": (None, 16),
    "qk_norm": True,
    "qkv_bias": True,
}


@pytest.mark.parametrize("name", CHANGES)
def test_k08_each_field_of_the_configuration_alone_is_another_name(name):
    changed = dataclasses.replace(tiny_config(), **{name: CHANGES[name]})
    assert names(changed) != names(tiny_config())
    assert names(tiny_config()) == names(tiny_config())


def test_k08_rope_weights_dtype_and_layout_alone_are_another_name():
    base = names(tiny_config())
    for field in dataclasses.fields(RopeConfig):
        value = {"kind": "linear", "freq_factors": (1.0, 2.0)}.get(field.name, 77)
        rope = dataclasses.replace(RopeConfig(), **{field.name: value})
        assert names(tiny_config(rope=rope)) != base, field.name
    assert names(tiny_config(), weights="v") != base
    assert names(tiny_config(), dtype="BF16") != base
    assert names(tiny_config(), shape=(4, 8, 2, 4)) != base


def test_k08_salt_and_parent_alone_are_another_name():
    plain, salted = make_chain((1, 2)), make_chain((1, 2), extra=(("salt", "a"),))
    after = make_chain((3, 4), (1, 2))[1:]
    assert len({FORMAT.file_name(key) for key in (*plain, *salted, *after)}) == 3


def test_k09_kinds_are_part_of_the_name():
    variants = [(("salt", "x"),), (("adapter", "x"),), (("adapter", "x"), ("salt", "x"))]
    keys = [make_chain((1, 2), extra=extra)[0] for extra in variants]
    assert len({FORMAT.file_name(key) for key in keys}) == 3
    assert namespace_digest((("a", "bc"),)) != namespace_digest((("ab", "c"),))
    assert namespace_digest((("a", "b"), ("c", "d"))) != namespace_digest((("a", "bcd"),))


def test_one_changed_weight_is_another_namespace():
    import torch

    model = tiny_model()
    digest = weights_digest(model)
    assert dict(kv_namespace(model, tiny_config()))["weights"] == digest == weights_digest(model)
    for parameter in model.parameters():
        flat, place = parameter.data.view(-1), parameter.numel() - 1
        before = float(flat[place])
        flat[place] = torch.nextafter(flat[place], torch.tensor(9.0))
        assert weights_digest(model) != digest
        flat[place] = before
    assert weights_digest(model) == digest


SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:]
from tier_helpers import FORMAT, make_chain
for key in make_chain((1, 2), (3, 4), extra=(("salt", "x"),)) + make_chain((0,)):
    print(FORMAT.file_name(key), key.digest.hex())
"""


def test_case_150_two_processes_agree_on_every_name():
    """LMCache/LMCache#1521: with Python's own hash() a second process never hits."""
    tests = Path(__file__).parents[2]
    outputs = set()
    for seed in ("0", "1", "random"):
        command = [sys.executable, "-c", SCRIPT, str(tests), str(Path(__file__).parent)]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(tests.parent)}
        outputs.add(subprocess.run(command, env=environment, capture_output=True).stdout)
    (same,) = outputs
    assert len(same.split()) == 6
