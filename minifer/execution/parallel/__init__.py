"""One model over several processes: tensor parallelism.

`LLM(model, tensor_parallel_size=2)` cuts every matrix in two. Each of two *ranks* holds half of the
weights and half of the KV cache, computes half of every layer, and twice a layer they add up what
they have. A model that is too large for one device fits into several, and a decode step, whose time
is that of reading the weights, reads half as many. The price is the adding: every one of those sums
waits for the slowest rank::

    shard.py     which part of each tensor a rank holds, and which sizes a model can be cut for
    layers.py    the two ideas: column-parallel, then row-parallel, one all-reduce a half-layer
    group.py     all-reduce and gather over torch.distributed (gloo on a CPU, NCCL between GPUs)
    loading.py   a rank reads its own slices
    runner.py    a step on rank 0, and on the others
    ranks.py     the other processes: started, told, ended, mourned
    worker.py    what such a process does
    messages.py  the little that they are told

Replies are those of one process: in float32 sums differ in their last bits, because they are
added in another order, and tokens do not. The slow twin is the model on a single rank. All ranks
run on one machine. A step is taken by all of them or the engine is lost (`RankError`).

Refused with it: the back ends that pack weights of their own (compiled, megakernel), codes for
weights (`quantize`), tiers below the device, which would store one rank's heads only, and loop
models. Drafts, grammars, chunked prefill, prefix caching and forks know nothing of ranks.

**Pipeline parallelism is not here.** It gives each process some of the layers, and passes hidden
states on. `torch.distributed.pipelining` does that for training, and three things keep it from
serving:

- Its stages exchange tensors of fixed shapes, inferred from the first batch, for which the receive
  buffers are made once. A step of this engine has another number of tokens each time. Its authors
  decided against shapes that change (https://github.com/pytorch/pytorch/issues/159942).
- It chunks a batch into micro-batches along one axis, and a stage sees its chunk of the arguments.
  Our batch is one flat axis of tokens with offsets, block tables and slots, and each stage keeps KV
  of its own from step to step; the schedule would chunk what must stay together.
- Above all, a decode step cannot fill a pipeline. Token t + 1 starts at stage 0 when token t has
  left the last stage: with one batch in flight p stages are busy 1/p of the time each, and a token
  takes as long as on one device. Filling it needs p batches in flight, whose requests do not
  overlap: a scheduler that plans a step before the last one's tokens are known. That changes the
  engine's loop, not its runner; vLLM does it with a queue of batches in its engine core, and sends
  hidden states itself, without this library.

What a pipeline offers beyond tensor parallelism is less to say (one hidden state a stage in place
of two sums a layer), which pays between machines. For those, run several engines.
"""
