"""One engine computes a prompt, another answers: the same as if one had done both."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from fakes import tiny_config, tiny_engine, tiny_model
from pair import GREEDY, SETTINGS, P, alone, alone_again, answer_of, pair, tokens_of

from minifer.config import RopeConfig
from minifer.engine import Engine
from minifer.kv.prefix_key import make_key
from minifer.request import SamplingParams
from minifer.serving.disaggregation.frames import Link
from minifer.serving.disaggregation.link_faults import Fault, LinkFaults
from minifer.serving.disaggregation.ticket import Ticket
from minifer.serving.disaggregation.worker import block_format

SAMPLED = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.95, seed=7)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(7 * i + i * i + 3 * seed) % 40 for i in range(length)]


def settings_with(**changes) -> dict:
    return {"settings": dataclasses.replace(SETTINGS, **changes)}


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def until(holds) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.002)


# -- right


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_k11_handed_over_is_recomputed(transport: str):
    """Every length around the blocks: full blocks come, and one token at least is computed."""

    async def scenario() -> None:
        async with pair(**settings_with(transport=transport)) as both:
            expected = 0
            for length in (1, 3, 4, 5, 8, 9, 12, 13, 50):
                prompt = prompt_of(length, seed=length)
                output = await both.ask(prompt)
                assert answer_of(output) == answer_of(await alone(prompt))
                assert output.num_cached_tokens == (length - 1) // P * P
                expected += (length - 1) // P
            stats = both.received
            assert stats.received.blocks == both.sent.sent.blocks == expected
            assert stats.received.bytes == expected * both.format.num_bytes
            assert stats.tokens == expected * P
            assert stats.corrupt == stats.broken == stats.timeouts == stats.refused == 0
            assert stats.recomputed_tokens == both.sent.broken == 0

    run(scenario())


@pytest.mark.parametrize(
    "params",
    [
        SAMPLED,
        SAMPLED.with_(n=3),
        GREEDY.with_(logprobs=3),
        GREEDY.with_(stop_token_ids=[1, 5, 9, 30]),
        GREEDY.with_(repetition_penalty=1.3, presence_penalty=0.5, min_tokens=3),
        SAMPLED.with_(cache_salt="tenant", logprobs=2, n=2),
        GREEDY.with_(prompt_logprobs=2),
    ],
    ids=["seed", "n", "logprobs", "stop", "penalties", "salt", "prompt_logprobs"],
)
def test_whatever_is_asked_for_the_answer_is_the_single_engines(params: SamplingParams):
    async def scenario() -> None:
        async with pair() as both:
            prompt = prompt_of(22)
            output, again = await both.ask(prompt, params), await alone_again(prompt, params)
            assert answer_of(output) == answer_of(again)
            assert tokens_of(output) == tokens_of(await alone(prompt, params))
            assert output.prompt_logprobs == again.prompt_logprobs
            blocks = 0 if params.prompt_logprobs is not None else 5
            assert both.received.received.blocks == blocks
            assert both.sent.prefills == (blocks > 0)

    run(scenario())


def test_only_what_the_decode_worker_lacks_is_fetched():
    async def scenario() -> None:
        async with pair() as both:
            for length, blocks in ((21, 5), (33, 8), (33, 8), (9, 8)):
                prompt = prompt_of(33)[:length]
                assert answer_of(await both.ask(prompt)) == answer_of(await alone(prompt))
                assert both.received.received.blocks == blocks
            assert both.received.pulls == 2

    run(scenario())


def test_several_prompts_have_one_ticket():
    async def scenario() -> None:
        async with pair() as both:
            prompts = {"a": prompt_of(9, 1), "b": [3], "c": prompt_of(17, 2)}
            ticket = await both.ticket(list(prompts.values()), GREEDY)
            assert [offer is None for offer in ticket.offers] == [False, True, False]
            with ExitStack() as resources:
                await both.receiver.fetch(ticket, prompts, GREEDY, resources)
                for name, prompt in prompts.items():
                    output = await both.decode.complete(prompt, GREEDY, request_id=name)
                    assert answer_of(output) == answer_of(await alone(prompt))
                    assert output.num_cached_tokens == (len(prompt) - 1) // P * P

    run(scenario())


def test_a_salt_is_kept_apart():
    async def scenario() -> None:
        async with pair() as both:
            prompt = prompt_of(21)
            await both.ask(prompt, GREEDY.with_(cache_salt="a"))
            output = await both.decode.complete(prompt, GREEDY.with_(cache_salt="b"))
            assert output.num_cached_tokens == 0

    run(scenario())


def test_blocks_travel_while_the_prompt_is_still_being_computed():
    async def scenario() -> None:
        async with pair(prefill={"max_num_batched_tokens": 8}) as both:
            go_on = threading.Event()
            real, steps = both.prefill.engine.runner.forward, []

            def forward(step):
                steps.append(step)
                if len(steps) == 4:  # of five
                    assert go_on.wait(30)
                return real(step)

            both.prefill.engine.runner.forward = forward
            prompt = prompt_of(40)
            asking = asyncio.create_task(both.ask(prompt))
            await until(lambda: both.received.pulls and len(steps) == 4)
            (offer,) = both.sender.offers
            assert not offer.computing.done()
            go_on.set()
            assert answer_of(await asking) == answer_of(await alone(prompt))
            assert both.received.received.blocks == 9

    run(scenario())


def test_a_second_decode_worker_can_fetch_the_same_ticket():
    async def scenario() -> None:
        async with pair() as both, pair() as other:
            prompt = prompt_of(30)
            ticket = await both.ticket([prompt], GREEDY)
            await both.ask(prompt, ticket=ticket)
            output = await other.ask(prompt, ticket=ticket)
            assert output.num_cached_tokens == 28
            assert answer_of(output) == answer_of(await alone(prompt))

    run(scenario())


# -- wrong


class Script(LinkFaults):
    """Fault number `at` of a link is this one."""

    def __init__(self, fault: Fault, at: int) -> None:
        super().__init__(seed=at)
        self.faults = [None] * at + [fault]

    def draw(self) -> Fault | None:
        return self.faults.pop(0) if self.faults else None


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("at", [0, 3, 6])
def test_k06_a_bit_that_flips_on_its_way_costs_time_and_no_token(transport: str, at: int):
    async def scenario() -> None:
        changes = {"transport": transport, "faults": Script(Fault.FLIP, at)}
        async with pair(**settings_with(**changes)) as both:
            prompt = prompt_of(29)
            output = await both.ask(prompt)
            assert answer_of(output) == answer_of(await alone(prompt))
            assert both.received.corrupt == 1 and both.received.tokens == at * P
            assert both.received.recomputed_tokens == (7 - at) * P
            assert output.num_cached_tokens == at * P
            output = await both.ask(prompt_of(29, seed=1))  # the next one is well again
            assert output.num_cached_tokens == 28

    run(scenario())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("fault", [Fault.DROP, Fault.STALL])
def test_a_link_that_breaks_leaves_what_has_come(transport: str, fault: Fault):
    async def scenario() -> None:
        changes = {"transport": transport, "faults": Script(fault, 4), "silence": 1.0}
        async with pair(**settings_with(**changes)) as both:
            prompt = prompt_of(29)
            output = await both.ask(prompt)
            assert answer_of(output) == answer_of(await alone(prompt))
            stats = both.received
            assert (stats.broken, stats.timeouts) == ((1, 0) if fault is Fault.DROP else (0, 1))
            assert stats.tokens + stats.recomputed_tokens == 7 * P
            if fault is Fault.STALL:
                assert stats.tokens == 4 * P
            else:  # what was on its way may be lost
                assert stats.tokens <= 4 * P

    run(scenario())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_links_that_break_at_random_never_cost_a_token(transport: str):
    async def scenario() -> None:
        faults = LinkFaults(drop=0.1, flip=0.1, seed=5)
        async with pair(**settings_with(transport=transport, faults=faults)) as both:
            prompts = [prompt_of(10 + i % 23, seed=i) for i in range(40)]
            answers = await asyncio.gather(*map(both.ask, prompts))
            for prompt, output in zip(prompts, answers, strict=True):
                assert answer_of(output) == answer_of(await alone(prompt))
            stats = both.received
            assert stats.broken > 3 and stats.corrupt > 3 and stats.tokens > 0
            assert stats.tokens + stats.recomputed_tokens == sum(
                (len(prompt) - 1) // P * P for prompt in prompts
            )

    run(scenario())


OTHERS = [  # each of these changes alone
    {"rope": RopeConfig(theta=5000.0)},
    {"rms_norm_eps": 1e-4},
    {"num_layers": 3},
    {"num_kv_heads": 4},
    {"head_dim": 16},
    {"hidden_size": 64},
    {"intermediate_size": 64},
    {"max_position_embeddings": 256},
]


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: next(iter(change)))
def test_k08_blocks_of_another_model_are_refused(change: dict):

    config = tiny_config(**change)
    with tiny_engine(config=config) as engine:
        other = block_format(SimpleNamespace(model=tiny_model(config), config=config), engine)
    check_refused(sender_format=other)


@pytest.mark.parametrize(
    "change", [{"dtype": "BF16"}, {"shape": (4, 2, 2, 8)}, {"namespace": (("weights", "x"),)}]
)
def test_k08_blocks_of_another_dtype_size_or_checkpoint_are_refused(change: dict):
    async def scenario() -> None:
        async with pair() as both:
            other = dataclasses.replace(both.format, **change)
        await refused(receiver_format=other)

    run(scenario())


def check_refused(**parts) -> None:
    run(refused(**parts))


async def refused(**parts) -> None:
    async with pair(**parts) as both:
        prompt = prompt_of(21)
        output = await both.ask(prompt)
        assert answer_of(output) == answer_of(await alone(prompt))
        assert both.received.refused == both.sent.refused == 1
        assert both.received.tokens == 0 and both.received.recomputed_tokens == 20


def test_k07_a_block_of_other_tokens_is_not_taken():
    """The sender's name for it is right, what it stands for is not: tokens are compared."""

    async def scenario() -> None:
        async with pair() as both:
            prompt, other = prompt_of(21), prompt_of(21, seed=1)
            ticket = await both.ticket([other], GREEDY)
            (offer,) = both.sender.offers
            await offer.computing
            keys = []
            for i in range(5):  # the digests of one prompt with the tokens of another
                mine = make_key(keys[-1] if keys else None, prompt[4 * i : 4 * i + 4])
                keys.append(dataclasses.replace(offer.keys[i], digest=mine.digest))
            offer.keys = keys
            await both.prefill.call(lambda engine: rename(engine, keys))
            output = await both.ask(prompt, ticket=ticket)
            assert answer_of(output) == answer_of(await alone(prompt))
            assert both.received.corrupt == 1 and both.received.tokens == 0

    run(scenario())


def rename(engine: Engine, keys) -> None:
    """What the DRAM tier holds under other names; it would never do so itself."""
    dram = engine.kv.tiers.dram
    blocks = list(dram._blocks.values())
    dram._blocks.clear()
    for block, key in zip(blocks, keys, strict=True):
        block.key = key
        dram._blocks[key.digest] = block


def test_a_ticket_of_nobody_is_worth_nothing():
    async def scenario() -> None:
        async with pair() as both:
            prompt = prompt_of(21)
            good = await both.ticket([prompt], GREEDY)
            for salt, ticket, counter in (
                ("a", Ticket("127.0.0.1", good.port, ("no such offer",)), "refused"),
                ("b", Ticket("127.0.0.1", 1, good.offers), "broken"),
                ("c", Ticket("127.0.0.1", good.port, good.offers * 2), "refused"),
            ):
                before = getattr(both.received, counter)
                output = await both.ask(prompt, GREEDY.with_(cache_salt=salt), ticket)
                assert answer_of(output) == answer_of(await alone(prompt))
                assert output.num_cached_tokens == 0
                assert getattr(both.received, counter) == before + 1

    run(scenario())


def test_a_worker_with_another_token_gets_nothing():
    async def scenario() -> None:
        other = dataclasses.replace(SETTINGS, token="not the token of the others")
        async with pair(receiver_settings=other) as both:
            prompt = prompt_of(21)
            assert answer_of(await both.ask(prompt)) == answer_of(await alone(prompt))
            assert both.received.tokens == 0 and both.received.broken == both.sent.broken == 1

    run(scenario())


def test_one_side_without_shared_memory_is_enough_to_do_without(monkeypatch):
    from minifer.serving.disaggregation import receiver, sender

    def missing(*_):
        raise OSError("no such thing")

    async def scenario() -> None:
        async with pair() as both:
            prompt = prompt_of(21)
            assert (await both.ask(prompt)).num_cached_tokens == 20

    for module, name in ((receiver, "open_segment"), (sender, "Segment")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, missing)
            run(scenario())


# -- late


def test_while_a_step_takes_long_the_receiver_is_told_that_somebody_works():
    async def scenario() -> None:
        often = dataclasses.replace(SETTINGS, silence=0.1)
        async with pair(sender_settings=often) as both:
            enough = threading.Event()
            real_send, real_forward, signs = Link.send, both.prefill.engine.runner.forward, []

            async def send(link, fields, *body):
                await real_send(link, fields, *body)
                signs.extend(key for key in fields if key == "wait")
                if len(signs) == 5:
                    enough.set()

            def forward(step):
                assert enough.wait(30)
                return real_forward(step)

            both.prefill.engine.runner.forward = forward
            with patch.object(Link, "send", send):
                output = await both.ask(prompt_of(21))
            assert output.num_cached_tokens == 20 and both.received.timeouts == 0

    run(scenario())


def test_who_waits_too_long_computes_it_himself():
    async def scenario() -> None:
        async with pair(**settings_with(timeout=0.2)) as both:
            go_on = threading.Event()
            real = both.prefill.engine.runner.forward

            def forward(step):
                go_on.wait(30)
                return real(step)

            both.prefill.engine.runner.forward = forward
            output = await both.ask(prompt_of(21))
            go_on.set()
            assert answer_of(output) == answer_of(await alone(prompt_of(21)))
            assert both.received.timeouts == 1 and both.received.recomputed_tokens == 20

    run(scenario())


def test_an_offer_that_nobody_fetches_is_forgotten():
    async def scenario() -> None:
        async with pair(**settings_with(lease=0.05)) as both:
            prompt = prompt_of(21)
            ticket = await both.ticket([prompt], GREEDY)
            await until(lambda: len(both.sender.offers) == 0)
            output = await both.ask(prompt, ticket=ticket)
            assert both.received.refused == 1 and output.num_cached_tokens == 0

    run(scenario())


def test_what_is_cancelled_computes_no_further():
    async def scenario() -> None:
        async with pair(prefill={"max_num_batched_tokens": 4}) as both:
            release = threading.Event()
            real = both.prefill.engine.runner.forward

            def forward(step):
                release.wait(30)
                return real(step)

            both.prefill.engine.runner.forward = forward
            ticket = await both.ticket([prompt_of(60)], GREEDY)
            both.sender.offers.cancel([offer for offer in ticket.offers if offer])
            await both.sender.offers.computed([offer for offer in ticket.offers if offer])
            release.set()
            await until(lambda: not both.prefill.engine.has_unfinished_requests)
            output = await both.ask(prompt_of(60), ticket=ticket)  # what is there is there
            assert output.num_cached_tokens < 12
            assert answer_of(output) == answer_of(await alone(prompt_of(60)))

    run(scenario())


def test_a_caller_who_leaves_while_it_is_fetched_leaves_nothing():
    async def scenario() -> None:
        async with pair() as both:
            release = threading.Event()
            real = both.prefill.engine.runner.forward

            def forward(step):
                release.wait(30)
                return real(step)

            both.prefill.engine.runner.forward = forward
            asking = asyncio.create_task(both.ask(prompt_of(40)))
            await until(lambda: both.sent.pulls)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert asking.cancelled()
            release.set()
            await until(lambda: not both.sender._links)

    run(scenario())


def test_a_request_that_never_comes_lets_go_of_its_blocks():
    async def scenario() -> None:
        async with pair() as both:
            prompt = prompt_of(21)
            ticket = await both.ticket([prompt], GREEDY)
            with ExitStack() as resources:
                await both.receiver.fetch(ticket, {"x": prompt}, GREEDY, resources)
                pinned = await both.decode.call(lambda engine: len(engine.kv.tiers.imports.blocks))
                assert pinned == 5

    run(scenario())


def test_nothing_stays_in_shared_memory():
    async def scenario() -> None:
        async with pair() as both:
            await asyncio.gather(*(both.ask(prompt_of(30, seed=i)) for i in range(8)))

    before = set(Path("/dev/shm").glob("minifer-kv-*")) if Path("/dev/shm").is_dir() else set()
    run(scenario())
    assert before == (set(Path("/dev/shm").glob("minifer-kv-*")) if before else before)


def test_a_tier_that_is_too_small_takes_the_front():
    async def scenario() -> None:
        async with pair(decode={"kv_dram_bytes": 3 * 1024}) as both:
            block = both.format.num_bytes
            prompt = prompt_of(40)
            output = await both.ask(prompt)
            assert answer_of(output) == answer_of(await alone(prompt))
            assert both.received.tokens == 3 * 1024 // block * P

    run(scenario())


def test_engines_need_not_be_the_same_size():
    async def scenario() -> None:
        small = {"num_kv_blocks": 16, "max_num_batched_tokens": 5}
        async with pair(decode=small) as both:
            prompt = prompt_of(45)
            output = await both.ask(prompt)
            assert answer_of(output) == answer_of(await alone(prompt))
            assert output.num_cached_tokens == 44

    run(scenario())
