"""`AsyncLLM`: many callers, one engine thread."""

from __future__ import annotations

import asyncio
import threading

import pytest
from fakes import tiny_engine, tiny_model

from minifer.async_llm import AsyncLLM
from minifer.execution.reference import reference_generate
from minifer.request import OutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=100)


def run(scenario, **options):
    """Run one scenario against a fresh engine; afterwards all is idle and the thread is gone."""

    async def main():
        async with AsyncLLM(engine=tiny_engine(**options)) as llm:
            result = await asyncio.wait_for(scenario(llm), 60)
            for _ in range(2000):  # aborts are carried out between steps
                if not llm.engine.has_unfinished_requests and llm._commands.empty():
                    break
                await asyncio.sleep(0.005)
            assert not llm.engine.has_unfinished_requests
            assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.num_blocks
        assert not llm._thread.is_alive()
        return result

    return asyncio.run(main())


def test_many_callers_get_what_each_would_get_alone():
    prompts = [[i % 40, (3 * i) % 40] for i in range(24)]

    async def scenario(llm):
        return await asyncio.gather(*(llm.complete(prompt, GREEDY) for prompt in prompts))

    outputs = run(scenario, max_num_seqs=5)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == reference_generate(tiny_model(), prompt, 8)


def test_a_stream_comes_piece_by_piece():
    async def scenario(llm):
        params = GREEDY.with_(output_kind=OutputKind.DELTA)
        return [output async for output in llm.generate([1, 2], params)]

    pieces = run(scenario)
    assert [len(piece.outputs[0].token_ids) for piece in pieces] == [1] * 8
    assert [piece.finished for piece in pieces] == [False] * 7 + [True]


def test_cancelling_the_caller_aborts_the_request():
    async def scenario(llm):
        started = asyncio.Event()

        async def consume():
            async for _ in llm.generate([1], LONG, request_id="victim"):
                started.set()

        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await llm.complete([2], GREEDY)

    assert len(run(scenario).outputs[0].token_ids) == 8


def test_leaving_the_loop_aborts_the_request():
    async def scenario(llm):
        stream = llm.generate([1], LONG)
        async for _ in stream:
            break
        await stream.aclose()

    run(scenario)


def test_a_refused_request_raises_and_disturbs_nobody():
    async def scenario(llm):
        good = asyncio.create_task(llm.complete([3], GREEDY, request_id="same"))
        with pytest.raises(ValueError, match="at least 1 token"):
            await llm.complete([], GREEDY)
        other = asyncio.create_task(llm.complete([4], LONG, request_id="twin"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="'twin' is still running"):
            await llm.complete([5], GREEDY, request_id="twin")
        return await good, await other

    good, other = run(scenario)
    assert len(good.outputs[0].token_ids) == 8
    assert len(other.outputs[0].token_ids) == 100, "the refused twin must not abort the first"


def test_close_tells_those_who_wait():
    async def main():
        llm = AsyncLLM(engine=tiny_engine())
        task = asyncio.create_task(llm.complete([1], SamplingParams(max_tokens=None)))
        await asyncio.sleep(0.01)
        closer = threading.Thread(target=llm.close)
        closer.start()
        outcome = await asyncio.gather(task, return_exceptions=True)
        closer.join()
        llm.close()  # twice is once
        with pytest.raises(RuntimeError, match="closed"):
            await llm.complete([1], GREEDY)
        return outcome[0]

    outcome = asyncio.run(main())
    finished = not isinstance(outcome, BaseException) and outcome.finished
    assert finished or (isinstance(outcome, RuntimeError) and "closed" in str(outcome))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_leaves_nobody_waiting():
    async def main():
        llm = AsyncLLM(engine=tiny_engine())

        def broken():
            raise SystemError("torn")

        llm.engine.step = broken
        with pytest.raises(RuntimeError, match=r"the engine stopped: SystemError: torn"):
            await asyncio.wait_for(llm.complete([1], GREEDY), 30)
        llm._thread.join(10)
        with pytest.raises(RuntimeError, match="closed"):
            await llm.complete([1], GREEDY)

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_asks_while_the_engine_dies_is_told_too():
    stepping, asked = threading.Event(), threading.Event()

    async def main():
        llm = AsyncLLM(engine=tiny_engine())

        def broken():
            stepping.set()
            asked.wait(30)
            raise SystemError("torn")

        llm.engine.step = broken
        first = asyncio.create_task(llm.complete([1], GREEDY))
        await asyncio.to_thread(stepping.wait, 30)
        second = asyncio.create_task(llm.complete([2], GREEDY))
        await asyncio.sleep(0)  # its command is in the queue now
        asked.set()
        outcomes = await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 30)
        assert [str(outcome) for outcome in outcomes] == [
            "the engine stopped: SystemError: torn"
        ] * 2

    asyncio.run(main())


def test_a_loop_that_closes_does_not_hurt_the_engine():
    llm = AsyncLLM(engine=tiny_engine())
    loop = asyncio.new_event_loop()
    stream = llm.generate([1], LONG)
    loop.run_until_complete(anext(stream))
    loop.is_closed = lambda: False  # as it looks a moment before it is closed
    loop.close()
    output = asyncio.run(llm.complete([2], GREEDY))
    assert len(output.outputs[0].token_ids) == 8
    llm.close()
    del loop.is_closed


def test_options_beside_an_engine_are_refused():
    with pytest.raises(ValueError, match="options must come without an engine, got max_num_seqs"):
        AsyncLLM(engine=tiny_engine(), max_num_seqs=4)


def test_a_request_without_params_takes_the_models_own():
    async def scenario(llm):
        llm.engine.default_params = SamplingParams(temperature=0, max_tokens=3)
        streamed = [output async for output in llm.generate([1])]
        return streamed[-1], await llm.complete([1])

    for output in run(scenario):
        assert output.outputs[0].token_ids == reference_generate(tiny_model(), [1], 3)
