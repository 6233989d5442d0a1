"""Triton kernels, one a file, each beside its slow twin. Imported as `minifer.kernels`.

The package stands at the top of the tree as `kernels/` and is installed below `minifer`, because
`kernels` is another project's name on the package index.

**Read in this order.**

    rms_norm                one row a program; the parts that every file here has
    gemv                    one vector times a matrix: all that a decode step mostly does
    gemm_small, gemm        the same for 2 to 16 rows, and for many
    norm_gemv, gate_up      the norm before a product, and the activation after it, inside of it
    linear                  which of these kernels for how many rows
    rope_append             rotate queries and keys, write keys and values to the paged cache
    flash_attention         attention of a prefill: softmax without a matrix of scores
    paged_decode            attention of a decode step: one query, its context in parts
    sample                  from logits to a token, without a sort
    inject                  a loop model: the state decays, the input is added
    quantized_gemv          weights of 8 and 4 bits (`quantization` makes them)
    mega/                   a whole decode step in one launch, and a proof that it cannot hang
    cosim/                  many programs at once on a CPU, in any order, watched for races

`compat` and `mode` know Triton's versions and its interpreter, `checks` refuses bad arguments,
`products` holds what the products share. `registry` lists the kernels; `aot`, `aot_report` and
`machine_code` compile them for GPUs that are not there (`minifer kernels report`).

**Every file has the same parts:** the maths with its shapes, and the price; `NAME_reference`, the
slow twin in plain torch, with the same arguments; the kernels; `NAME`, which checks its arguments,
chooses tiles and launches; `NAME_cost`, its FLOPs and bytes; `aot_cases`, what is compiled ahead of
time. Import a kernel from its own module: `from minifer.kernels.gemv import gemv`. This package
itself imports nothing, because whoever imports triton decides where kernels run (`mode`).

**Words.**

    program         one run of a kernel's code; a launch `kernel[grid](…)` starts many, which differ
                    in `tl.program_id` alone and may run in any order. CUDA's thread block
    SM              streaming multiprocessor: what runs programs, 132 of them in an H100. AMD:
                    compute unit
    warp            32 threads that execute one instruction together (AMD: 64, a wave); a program
                    has num_warps of them
    tile            a small block [rows, columns] of a matrix that a program holds in registers.
                    Sizes are powers of two and known at compile time (`tl.constexpr`); what lies
                    beyond the matrix is masked, not read. "Block" is a block of the KV cache
    stage           num_stages − 1 tiles are on their way from memory while one is worked on
    shared memory   up to 227 KiB inside of an SM, where tiles on their way arrive
    L2              the cache that all SMs share
    tensor core     multiplies small matrices of 16-bit numbers (`tl.dot`); AMD: matrix core
    spill           a number that found no register and went to memory and back
    fused           several operations in one launch: what is between them is not written to memory
    split-KV        one context cut into parts for several programs, whose results are merged
    PDL             programmatic dependent launch: a kernel starts before the one before it has
                    ended, loads what that one does not make (weights), and then waits for it.
                    NVIDIA, compute capability 9.0 and newer; the argument `pdl` of every kernel
                    that has it

**Letters** are those of `minifer/config.py` (B requests, T tokens, S context, D width, F width of
the MLP, H query heads, K KV heads, C head dim, L layers, V vocabulary, P block size, N blocks), and
G = H / K, the query heads of a KV head. A weight is [out, in]. Inside a kernel that multiplies, N
and K are the weight's rows and columns, as in BLAS, and BN, BK, BM, BT the sides of tiles. In
`mega/`, S is the number of parts that a context is cut into.

**What runs where.** On an NVIDIA GPU all of it, compiled (sm_80, sm_90 and sm_100: A100, H100 or
H200, B200). On a CPU all of it too, in Triton's interpreter, which executes one program after the
other in numpy: for correctness, since even the bundled minifer-tiny takes seconds a token.
`minifer` sets TRITON_INTERPRET=1 where there is no GPU. For AMD's gfx942 (MI300X) every kernel is
compiled ahead of time, and none has run.

**What has not been measured.** No kernel has a speed yet: tiles were chosen by arithmetic, and by
what the compiler makes of them. `.ci/gpu` measures on one GPU, `minifer kernels timeline` is a
model. The interpreter shows no missing barrier inside a program, and neither registers nor caches.
"""
