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


def test_several_prompts_are_opened_together_and_end_each_on_its_own():
    prompts = [[1, 2], [3], [4, 5, 6]]

    async def scenario(llm):
        stream = await llm.open(prompts, GREEDY, request_ids=["a", "b", "c"])
        last = {}
        async for output in stream:
            last[output.request_id] = output
        stream.close()  # over already: nothing happens
        return last

    last = run(scenario)
    for name, prompt in zip("abc", prompts, strict=True):
        assert last[name].finished
        assert last[name].outputs[0].token_ids == reference_generate(tiny_model(), prompt, 8)


@pytest.mark.parametrize("bad", [[], [99], "text"])
def test_one_refused_prompt_refuses_all(bad):
    async def scenario(llm):
        with pytest.raises(ValueError):
            await llm.open([[1], bad, [2]], LONG)
        assert await llm.call(lambda engine: engine.num_unfinished_requests) == 0

    run(scenario)


def test_closing_a_stream_aborts_all_of_it():
    async def scenario(llm):
        stream = await llm.open([[1], [2]], LONG)
        await anext(stream)
        stream.close()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(scenario)


def test_cancelled_before_it_is_admitted_nothing_stays():
    async def scenario(llm):
        busy = threading.Event()
        llm.post(lambda engine: busy.wait(10))
        task = asyncio.create_task(llm.open([[1]], LONG))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        busy.set()
        assert await llm.call(lambda engine: engine.num_unfinished_requests) == 0

    run(scenario)


def test_a_function_runs_on_the_engines_thread(caplog):
    async def scenario(llm):
        assert await llm.call(lambda engine: threading.current_thread()) is llm._thread
        with pytest.raises(ZeroDivisionError):
            await llm.call(lambda engine: 1 / 0)
        llm.post(lambda engine: 1 / 0)
        return await llm.complete([1], GREEDY)  # the thread is still there

    run(scenario)
    assert "ZeroDivisionError" in caplog.text


def test_abort_all_gives_every_caller_a_last_output():
    async def scenario(llm):
        tasks = [asyncio.create_task(llm.complete([i], LONG)) for i in range(3)]
        while await llm.call(lambda engine: engine.num_unfinished_requests) < 3:
            await asyncio.sleep(0)
        llm.abort_all()
        return await asyncio.gather(*tasks)

    for output in run(scenario):
        assert output.finished and output.outputs[0].finish_reason == "abort"


def test_what_a_closed_loop_asked_for_is_aborted():
    llm = AsyncLLM(engine=tiny_engine())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(llm.open([[1]], LONG.with_(max_tokens=110)))
    loop.close()  # nobody will ever read the stream, or close it
    asyncio.run(llm.complete([2], GREEDY))
    assert asyncio.run(llm.call(lambda engine: engine.num_unfinished_requests)) == 0
    llm.close()


def test_one_wake_up_serves_all_streams_of_a_loop():
    """Of 16 requests that advance in one step, the loop is woken once."""

    async def scenario(llm):
        loop, wakes = asyncio.get_running_loop(), []
        wake = loop.call_soon_threadsafe
        stream = await llm.open([[i] for i in range(16)], GREEDY)
        loop.call_soon_threadsafe = lambda *args: (wakes.append(1), wake(*args))[1]
        outputs = [output async for output in stream]
        del loop.call_soon_threadsafe
        return len(outputs), len(wakes)

    outputs, wakes = run(scenario)
    assert outputs == 16 * 8 and wakes <= 8


def test_a_step_is_told_to_whoever_counts():
    async def scenario(llm):
        steps = []
        llm.on_step = steps.append
        await llm.complete([1, 2, 3], GREEDY)
        return steps

    assert run(scenario) == [3] + [1] * 7
