"""The life of a token, in five calls. `Engine.step` is the table of contents of the book."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from minifer.assembly import load, parts_of
from minifer.config import EngineConfig
from minifer.events import EventBus, EventSink, StepTimer
from minifer.exclusive import one_at_a_time
from minifer.execution.grammar import GrammarCompiler
from minifer.execution.runner import Runner, close_runner, prepare_backend
from minifer.execution.sampler import (
    NON_FINITE,
    Sampled,
    Sampler,
    SampleRow,
    prompt_logprobs,
    reads_largest_only,
)
from minifer.execution.speculation.proposer import Proposer, SpeculationStats, make_proposer
from minifer.kv.invariants import check_invariants
from minifer.kv.manager import KVCacheManager
from minifer.kv.shadow import ShadowKV
from minifer.kv.step_input import StepInput
from minifer.kv.tiers.tiers import KVTiers
from minifer.outputs import RequestGroup, RequestOutput
from minifer.postprocessing.hooks import TokenHook, check_hooks
from minifer.postprocessing.postprocessor import Postprocessor
from minifer.request import MAX_SEED, Request, RequestStatus, SamplingParams
from minifer.sampling_params import as_params, is_text
from minifer.scheduling.admission import Limits, admit, derive_seed
from minifer.scheduling.plan import ScheduledRequest, SchedulePlan
from minifer.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from minifer.text.tokenizer import Tokenizer


_Step = Callable[["Engine"], list[RequestOutput]]


def _or_begin_again(step: _Step) -> _Step:
    """Whatever leaves a step by an exception, Ctrl-C above all, may have torn it anywhere."""

    @functools.wraps(step)
    def call(self: Engine) -> list[RequestOutput]:
        try:
            return step(self)
        except BaseException as error:
            self._begin_again(error)
            raise

    return call


class Engine:
    """Requests in, tokens out, one step at a time. Not thread-safe: one thread drives it.

    `Engine.from_pretrained` builds one for a model; the constructor takes the parts, so that
    tests and simulations can bring their own runner.

    runner: computes logits. limits: what admission checks. tokenizer: None for token ids only.
    default_params: of requests that bring none (a model's `generation_config.json`).
    tiers: KV below the device, which must be given where the configuration asks for it. proposer:
    who drafts, instead of the one that the configuration names. sinks: receive every event. clock:
    seconds, for metrics and events.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        limits: Limits,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] = (),
        default_params: SamplingParams | None = None,
        tiers: KVTiers | None = None,
        proposer: Proposer | None = None,
        sinks: Sequence[EventSink] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if config.has_kv_tiers and tiers is None:
            raise ValueError("kv_dram_bytes and kv_disk_path need tiers, got None")
        self.config = config
        self.limits = limits
        self.tokenizer = tokenizer
        self.default_params = as_params(default_params)
        self.events = EventBus(*sinks, clock=clock)
        self.kv = KVCacheManager(
            limits.kv_capacity // config.block_size,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            index=config.prefix_index,
            events=self.events,
            tiers=tiers,
            debug=config.debug,
        )
        self.shadow = ShadowKV(config.block_size) if config.debug else None
        self.proposer = make_proposer(config) if proposer is None else proposer
        self.speculation_stats = SpeculationStats()
        self.scheduler = Scheduler(config, self.kv, self.events, self.proposer)
        self.runner = runner
        self.sampler = Sampler(rejection=config.speculative_acceptance == "rejection")
        self.grammars = GrammarCompiler(tokenizer, limits.vocab_size)
        decode = tokenizer.decode if tokenizer is not None else None
        self.postprocessor = Postprocessor(decode, self.events, config.guards)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seed = config.seed if config.seed is not None else time.time_ns()
        self._num_admitted = 0
        self.num_step_tokens = 0  # completed by the last step
        self._working = False  # inside one of its own methods
        self._closed = False
        self._requests: dict[str, Request] = {}  # the first sequence of every open request
        self._replying: Request | None = None  # whose new tokens stage 5 is working on
        self._outputs: list[RequestOutput] = []  # of this step, or of one that was interrupted

    @classmethod
    def from_pretrained(
        cls,
        model: str = "default",
        *,
        sinks: Sequence[EventSink] = (),
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> Engine:
        """Load a model (name, folder, GGUF file or hub id) and build an engine for it.

        options: fields of `EngineConfig`. Raises `ValueError` for an unknown or bad one.
        """
        config = EngineConfig.from_kwargs(model=model, **options)
        prepare_backend(config)
        return cls.from_loaded(load(config), config, sinks=sinks, clock=clock)

    @classmethod
    def from_loaded(cls, loaded: Any, config: EngineConfig, **parts: Any) -> Engine:
        """Build an engine around a `LoadedModel`."""
        return cls(config, **(parts_of(loaded, config) | parts))

    # -- requests

    @one_at_a_time
    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        hooks: Sequence[TokenHook] = (),
    ) -> None:
        """Admit one request; its tokens come from later calls of `step`.

        prompt: text or token ids. hooks: see `postprocessing/hooks.py`; copied for each of n
        sequences. Raises `ValueError` when it is refused, `RuntimeError` when the engine is
        closed; nothing has changed then.
        """
        if self._closed:
            raise RuntimeError("the engine is closed")
        self._check_new("request_id", request_id)
        params = self.default_params if params is None else as_params(params)
        hooks = check_hooks(hooks)
        text = prompt if isinstance(prompt, str) else None
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, this engine has none")
        request = admit(
            request_id,
            text,
            self._encode(text) if text is not None else prompt,  # type: ignore[arg-type]
            params,
            self.limits,
            derive_seed(self._seed, self._num_admitted),
            self._eos_token_ids,
            self.tokenizer,
            self.grammars,
        )
        self.postprocessor.open(request, hooks)
        self._num_admitted += 1
        self._requests[request_id] = request
        request.group.metrics.arrival_time = self.events.clock()
        self.scheduler.add(request)
        if self.events:
            span = (0, request.num_prompt_tokens)
            self.events.emit("scheduling", "request.admitted", request_id, span, n=params.n)

    @one_at_a_time
    def fork(self, request_id: str, new_request_id: str, seed: int | None = None) -> None:
        """Branch a request: a second one goes on from the same tokens with its own noise.

        Both share the blocks so far (copy-on-write). seed: of the new branch; None derives one.
        Raises `ValueError` for an unknown request, a used id, or one with n > 1.
        """
        parent = self._requests.get(request_id)
        if parent is None:
            raise ValueError(f"request_id must name an open request, got {request_id!r}")
        self._check_new("new_request_id", new_request_id)
        if parent.params.n > 1:
            raise ValueError(f"a request with n > 1 cannot be forked, got n={parent.params.n}")
        scored = parent.group.prompt_logprobs
        group = RequestGroup(new_request_id, parent.group.prompt)
        group.prompt_logprobs = None if scored is None else list(scored)
        group.metrics.arrival_time = self.events.clock()
        child = parent.fork(new_request_id, group)
        child.params = parent.params.with_(seed=seed)  # which checks it
        if seed is None:
            seed = derive_seed(self._seed, self._num_admitted)
        child.seed = seed % MAX_SEED
        self.postprocessor.fork(parent, child)
        self._num_admitted += 1
        self._requests[new_request_id] = child
        seat = self.scheduler.seats_taken < self.config.max_num_seqs
        if parent.status is RequestStatus.RUNNING and seat:
            self.scheduler.fork(parent, child)
        else:
            self.scheduler.add(child)
        self._report_fork(parent, child)

    def _check_new(self, name: str, request_id: Any) -> None:
        if not is_text(request_id):
            raise ValueError(
                f"{name} must be a non-empty string of valid Unicode, got {request_id!r}"
            )
        if request_id in self._requests or any(o.request_id == request_id for o in self._outputs):
            raise ValueError(f"{name} must be new, {request_id!r} is still running")

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(
                "a text prompt needs a tokenizer, this engine has none: give token ids"
            )
        return self.tokenizer.encode(text)

    @one_at_a_time
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at any moment between steps; None when it is unknown or already done.

        Its sequences finish with `finish_reason="abort"` and keep what they have.
        """
        self._outputs = [o for o in self._outputs if o.request_id != request_id]
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end_all(request, "abort")
        return self._output(request)

    @property
    def guard_trips(self) -> Counter[str]:
        """Alarms by guard, since the start."""
        return self.postprocessor.guards.trips

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests or self._outputs)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    # -- the step

    @one_at_a_time
    @_or_begin_again
    def step(self) -> list[RequestOutput]:
        """Move every request that fits by some tokens; returns what the callers get to see.

        A fault inside the step ends the requests of this step with `finish_reason="error"`; the
        engine and the waiting requests go on. After Ctrl-C all of them begin again.
        """
        if not self._requests:
            return self._hand_out()
        self.events.step += 1
        timer = StepTimer(self.events)
        plan = self.scheduler.schedule()  # 1  who gets how many tokens; asks 2 for hits and blocks
        self.num_step_tokens = 0
        timer.lap("step.scheduled", "scheduling")
        if not plan:  # everybody waits for the disk
            self.kv.wait_for_loads()
            return self._hand_out()
        try:
            batch = self.kv.prepare(plan)  # 2  slot of every token
            timer.lap("step.prepared", "kv")
            if self.proposer is not None:
                self.proposer.propose(batch)  # guesses, which the same pass will judge
                timer.lap("step.drafted", "decode")
            if self.shadow is not None:
                self.shadow.follow(plan, batch)
            batch.greedy = self._reads_largest_only(batch)
            logits = self.runner.forward(batch)  # 3  prefill rows and 4 decode rows, one batch
            self.num_step_tokens = plan.num_completed_tokens
            if self.events:
                stage = "decode" if plan.is_decode else "prefill"
                timer.lap("step.forward", stage, **plan.counts | batch.work)
            tokens = self.sampler(logits, self._sample_rows(batch))  # 4  one draw a sequence
            self._score_prompts(batch, logits)
            timer.lap("step.sampled", "decode")
        except Exception as error:
            return self._fail_step(plan, error)
        self.scheduler.advance(plan)
        self._postprocess(plan, batch, tokens)  # 5  text, stops; frees what is done
        self.kv.store(plan, batch)
        timer.lap("step.postprocessed", "postprocessing")
        if self.config.debug:
            check_invariants(self.kv, (*self.scheduler.running, *self.scheduler.waiting))
        return self._hand_out()

    def _reads_largest_only(self, batch: StepInput) -> bool:
        """May the runner keep the logits to itself, and say where the largest are?"""
        requests = (entry.request for entry, _ in batch.sampled)
        return not batch.prompt_rows and all(map(reads_largest_only, requests))

    def _sample_rows(self, batch: StepInput) -> list[SampleRow]:
        """One draw for each request that has caught up, and one after each of its drafts; n draws
        from one row before a fork."""
        rows: list[SampleRow] = []
        for entry, row in batch.sampled:
            request, forks = entry.request, entry.request.forks_pending
            rows += [
                SampleRow(row, request, (request.seed + i) % MAX_SEED) for i in range(1 + forks)
            ]
            drafts = range(1, 1 + entry.num_draft)
            rows += [SampleRow(row + i, request, request.seed, i) for i in drafts]
        return rows

    def _score_prompts(self, batch: StepInput, logits: Any) -> None:
        for entry, position, rows in batch.prompt_rows:
            request = entry.request
            following = request.prompt_token_ids[position + 1 :][: len(rows)]
            k = request.params.prompt_logprobs
            assert k is not None  # only such requests have prompt rows
            scored = prompt_logprobs(logits[rows.start : rows.stop], following, k)
            self.postprocessor.add_prompt_logprobs(request.group, scored)

    def _postprocess(self, plan: SchedulePlan, batch: StepInput, tokens: Sequence[Sampled]) -> None:
        queue = iter(tokens)
        now = self.events.clock()
        for entry in plan.scheduled:
            metrics = entry.request.group.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
        touched = {entry.request.group: entry.request for entry, _ in batch.sampled}
        for entry, _ in batch.sampled:
            self._replying = request = entry.request
            for sequence in [request, *self._fork_pending(request)]:
                self._accept(entry, sequence, [next(queue) for _ in range(1 + entry.num_draft)])
        self._replying = None
        self._report(touched.values())

    def _accept(self, entry: ScheduledRequest, sequence: Request, tokens: list[Sampled]) -> None:
        """The token after the newest one; while it is what was drafted there, the next one too."""
        drafts, num_right = sequence.draft_token_ids, 0
        for place, sampled in enumerate(tokens):
            if sampled.error in NON_FINITE:
                self.kv.withdraw(sequence)
            ended = self.postprocessor.accept(sequence, sampled)
            right = sampled.token_id in drafts[place : place + 1]
            num_right += right
            if ended or not right:
                break
        if drafts and sampled.error is None:
            self.speculation_stats.count(len(drafts), num_right)
            self.scheduler.keep_drafts(entry, num_right)
        if ended:
            self.scheduler.finish(sequence)

    def _fork_pending(self, request: Request) -> list[Request]:
        """The prompt is computed: make the other n − 1 sequences, on the same blocks."""
        children = [
            request.fork(f"{request.request_id}#{index}", request.group, index)
            for index in range(1, 1 + request.forks_pending)
        ]
        request.forks_pending = 0
        for child in children:
            self.scheduler.fork(request, child)
            self.postprocessor.fork(request, child)
            self._report_fork(request, child)
        return children

    def _report_fork(self, parent: Request, child: Request) -> None:
        if self.events:
            self.events.emit(
                "scheduling",
                "request.forked",
                child.request_id,
                (0, child.num_tokens),
                parent=parent.request_id,
                blocks=list(child.block_table),
            )

    def _fail_step(self, plan: SchedulePlan, error: Exception) -> list[RequestOutput]:
        self.scheduler.take_back(plan)
        reason = f"{type(error).__name__}: {error}"
        groups = {entry.request.group: entry.request for entry in plan.scheduled}
        for request in groups.values():
            self._end_all(request, "error", reason)
        self._report(groups.values())
        return self._hand_out()

    def _begin_again(self, error: BaseException) -> None:
        """A step was interrupted. Whose reply it was writing ends, the others begin again.

        They draw the same tokens: a draw's noise depends on its seed and its place alone.
        """
        opened = list(self._requests.values())
        sequences = [s for r in opened for s in self.postprocessor.sequences(r.group)]
        self.scheduler.restart(s for s in sequences if not s.finished)
        if self._replying is not None:
            for sequence in self.postprocessor.sequences(self._replying.group):
                if not sequence.finished:
                    self.postprocessor.fail(sequence, error)
            self._end_all(self._replying, "error")
            self._replying = None
        self._report(r for r in opened if self.postprocessor.finished(r.group))

    def _end_all(self, request: Request, reason: str, stop_reason: str | None = None) -> None:
        """End every sequence of a request that has not ended, and those still to be forked."""
        request.forks_pending = 0
        sequences = self.postprocessor.sequences(request.group)
        request.group.n = len(sequences)
        for sequence in sequences:
            if not sequence.finished:
                self._end(sequence, reason, stop_reason)

    def _report(self, requests: Iterable[Request]) -> None:
        """Collect what their callers get to see."""
        for request in requests:
            output = self._output(request)
            if output is not None:
                self._outputs.append(output)

    def _hand_out(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _end(self, sequence: Request, reason: str, stop_reason: str | None = None) -> None:
        self.postprocessor.end(sequence, reason, stop_reason)
        self.scheduler.finish(sequence)

    def _output(self, request: Request) -> RequestOutput | None:
        output = self.postprocessor.output(request.group)
        if output is not None and output.finished:
            del self._requests[request.group.request_id]
        return output

    # -- the end

    def close(self) -> None:
        """Abort what is left, let go of the model and its cache, and end the processes of its other
        ranks. Safe to call twice."""
        for request_id in list(self._requests):
            self.abort(request_id)
        if not self._closed:
            self._closed = True
            self.kv.close()
            close_runner(self.runner)
            del self.runner

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
