"""Counter-based noise: known answers, independence of everything else, the right distribution."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sampling_helpers import chi_square, chi_square_limit

from minifer.execution.noise import exponential, philox, token_noise, vocabulary_noise
from minifer.execution.sampler_reference import reference_noise

# Random123's published kat_vectors: counter, key, answer.
KNOWN_ANSWERS = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(counter, key, answer):
    assert philox(words(counter), words(key)) == words(answer)


def test_a_draw_reads_the_documented_counter_and_word():
    seed, index = 0x299F31D0A4093822, 7
    block = philox(words("00000003 00000007 0 0"), words("a4093822 299f31d0"))
    expected = exponential(torch.stack(block))
    assert torch.equal(vocabulary_noise([seed], [index], 16)[0, 12:], expected)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**63 + 5, 2**64 - 1])
def test_vocabulary_token_and_reference_noise_agree(seed):
    V = 10  # not a multiple of the four words of a block
    whole = vocabulary_noise([seed, 3], [5, 0], V)
    assert whole.shape == (2, V)
    ids = torch.tensor([[9, 0, 4], [1, 1, 8]])
    assert torch.equal(token_noise([seed, 3], [5, 0], ids), whole.gather(1, ids))
    expected = [reference_noise(seed, 5, token) for token in range(V)]
    torch.testing.assert_close(whole[0].double(), torch.tensor(expected).double())


def test_noise_depends_on_seed_output_index_and_token_only():
    alone = vocabulary_noise([11], [4], 64)[0]
    among = vocabulary_noise([5, 11, 11], [4, 4, 5], 64)
    assert torch.equal(among[1], alone)
    assert not torch.isclose(among[0], alone).any()
    assert not torch.isclose(among[2], alone).any()
    assert alone.unique().numel() == 64


def test_both_halves_of_the_seed_count_and_a_negative_seed_is_its_twos_complement():
    low, high, both = vocabulary_noise([1, 1 << 32, (1 << 32) + 1], [0] * 3, 8)
    assert not torch.equal(low, high) and not torch.equal(low, both)
    minus = vocabulary_noise([-1, 2**64 - 1], [0, 0], 8)
    assert torch.equal(minus[0], minus[1])


def test_noise_is_never_zero_nor_infinite_and_its_logarithm_is_finite():
    q = exponential(torch.tensor([0, 1, 2**31, 2**32 - 257, 2**32 - 1]))
    assert q.dtype == torch.float32
    assert q.log().isfinite().all()
    assert q[0].item() == pytest.approx(2**-33)
    assert q[1].item() == pytest.approx(3 * 2**-33)  # small values, the winners, stay distinct
    assert q[2].item() == pytest.approx(math.log(2))
    assert q[-1].item() == pytest.approx(24 * math.log(2))


def test_noise_is_exponential_and_its_words_are_uniform():
    q = vocabulary_noise(range(8), range(100, 108), 4096).flatten().double()
    n = q.numel()
    # Kolmogorov-Smirnov: sqrt(n) · distance stays below 2.5 but once in 100,000
    cdf = 1 - torch.exp(-q.sort().values)
    distance = (cdf - torch.arange(1, n + 1) / n).abs().max().item()
    assert distance * n**0.5 < 2.5
    cells = (16 * (1 - torch.exp(-q))).long().clamp(max=15)
    assert chi_square(cells.bincount(minlength=16).tolist(), [n / 16] * 16) < chi_square_limit(15)


@pytest.mark.parametrize("neighbour", ["token", "word", "output index", "seed"])
def test_neighbouring_draws_are_independent(neighbour):
    seeds, indices = [0] * 64, list(range(64))
    if neighbour == "seed":
        seeds, indices = indices, seeds
    cell = (4 * (1 - torch.exp(-vocabulary_noise(seeds, indices, 256)))).long().clamp(max=3)
    if neighbour == "token":
        pairs = 4 * cell[:, 1::2] + cell[:, ::2]
    elif neighbour == "word":
        pairs = 4 * cell[:, 4:] + cell[:, :-4]
    else:
        pairs = 4 * cell[1:] + cell[:-1]
    counts = pairs.flatten().bincount(minlength=16)
    expected = [pairs.numel() / 16] * 16
    assert chi_square(counts.tolist(), expected) < chi_square_limit(15)


TRITON = """
import torch, triton, triton.language as tl

@triton.jit
def kernel(out, seed, index):
    block = tl.arange(0, 4)
    c = tl.philox(seed, block, index + block * 0, block * 0, block * 0)
    for word in tl.static_range(4):
        tl.store(out + block * 4 + word, c[word])

out = torch.zeros(16, dtype=torch.int64)
kernel[(1,)](out, 0x299F31D0A4093822, 7)
print(*(int(x) % 2**32 for x in out))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="triton is a Linux package")
def test_tritons_philox_gives_the_same_words(tmp_path: Path):
    script = tmp_path / "philox_kernel.py"  # triton reads a kernel's source from its file
    script.write_text(TRITON)
    environment = {"TRITON_INTERPRET": "1", "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    theirs = exponential(torch.tensor([int(word) for word in done.stdout.split()]))
    assert torch.equal(theirs, vocabulary_noise([0x299F31D0A4093822], [7], 16)[0])
