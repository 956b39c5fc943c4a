"""What ranks say to each other from inside a kernel: publish, wait (bounded in time), fail.

``TARGET`` is "cuda", "gfx9", "gfx12" or "interpret" everywhere: the instructions differ, the
protocol does not. The AMD ones were compiled and read, never run. Flags are 32-bit sequence
numbers, compared by signed difference, so that they may wrap.

Ordering. ``publish``: payload stores of all threads, a barrier of the block, then one release of
each flag at system scope. ``wait``: an acquire at system scope by the polling threads, then the
barrier of the reduction that tells every thread. So what a peer stored before it published is seen
by every thread after ``wait``.
"""

import triton
import triton.language as tl

# Turns of a waiting block between two looks at the clock and at its host's abort word, which lies
# across PCIe: on an H200, 256 blocks that read it at every turn needed 500 us for a turn.
TURNS_PER_LOOK = tl.constexpr(1024)
# The interpreter has no clock; one turn there takes about this long.
TURN_NS = tl.constexpr(200_000)
HURRY_NS = tl.constexpr(30_000_000_000)
TIMED_OUT = tl.constexpr(1)
MISMATCH = tl.constexpr(2)


@triton.jit
def words_at(address, offset):
    """Pointer to 32-bit words at a byte offset of an address (int64)."""
    return (address + offset).to(tl.pointer_type(tl.int32))


@triton.jit
def longs_at(address, offset):
    """Pointer to 64-bit words at a byte offset of an address (int64)."""
    return (address + offset).to(tl.pointer_type(tl.int64))


@triton.jit
def vectors_at(address, DTYPE: tl.constexpr):
    """Pointer to elements at an address that is a multiple of 16 bytes.

    Add offsets to the pointer, not to the address: Triton folds ``address + constant`` into the
    pointer and forgets the alignment with it, so that every access becomes one element wide.
    """
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def below(offsets, limit):
    """Which offsets lie in a row: what bounds the last slab of a product."""
    return offsets < limit


@triton.jit
def clock(lanes, TARGET: tl.constexpr):
    """Nanoseconds, for each lane; on AMD GPUs ticks of 10 ns, scaled."""
    if TARGET == "cuda":
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [lanes], tl.int64, is_pure=False, pack=1
        )
    elif TARGET == "gfx12":
        now = 10 * tl.inline_asm_elementwise(
            "s_sendmsg_rtn_b64 $0, sendmsg(MSG_RTN_GET_REALTIME)\n\ts_wait_kmcnt 0",
            "=s,v",
            [lanes],
            tl.int64,
            is_pure=False,
            pack=1,
        )
    elif TARGET == "gfx9":
        now = 10 * tl.inline_asm_elementwise(
            "s_memrealtime $0\n\ts_waitcnt lgkmcnt(0)",
            "=s,v",
            [lanes],
            tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        now = lanes.to(tl.int64) * 0
    return now


@triton.jit
def load_acquire(pointers, active, TARGET: tl.constexpr):
    """The words at ``pointers`` where ``active``, 0 elsewhere."""
    if TARGET == "cuda":
        seen = tl.inline_asm_elementwise(
            """
            {
            .reg .pred %p;
            setp.ne.s32 %p, $2, 0;
            mov.u32 $0, 0;
            @%p ld.acquire.sys.global.u32 $0, [$1];
            }
            """,
            "=r,l,r",
            [pointers, active.to(tl.int32)],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        seen = tl.atomic_add(pointers, 0, mask=active, sem="acquire", scope="sys")
        seen = tl.where(active, seen, 0)
    return seen


@triton.jit
def store_release(pointers, value, active, TARGET: tl.constexpr):
    """Let peers see ``value``, and before it everything this block has stored.

    A store where it can be one: atomics on a peer's memory need more of a PCIe link.
    """
    if TARGET == "gfx9":
        # Triton 3.6 leaves out the wait for the write-back (facts: gfx942, gfx950).
        tl.inline_asm_elementwise(
            "buffer_wbl2 sc0 sc1\n\ts_waitcnt vmcnt(0)\n\tv_mov_b32 $0, $1",
            "=v,v",
            [value + active.to(tl.int32) * 0],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()
    if TARGET == "cuda":
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred %p;
            setp.ne.s32 %p, $3, 0;
            mov.u32 $0, 0;
            @%p st.release.sys.global.u32 [$1], $2;
            }
            """,
            "=r,l,r,r",
            [pointers, value + active.to(tl.int32) * 0, active.to(tl.int32)],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(pointers, value, mask=active, sem="release", scope="sys")


@triton.jit
def must_stop(
    turns, start, flags, STICKY: tl.constexpr, limit_ns, page, lanes, TARGET: tl.constexpr
):
    """1 if a block that has waited for ``turns`` since ``start`` must give up: time is over,
    another block has failed, or the host says so in the first word of ``page`` (1: at once, 2:
    after ``HURRY_NS``). Looks now and then.
    """
    stop = 0
    if (TARGET == "interpret") | (turns % TURNS_PER_LOOK == 0):
        if TARGET == "interpret":
            waited = lanes.to(tl.int64) * 0 + turns * TURN_NS
        else:
            waited = clock(lanes, TARGET) - start
        abort = tl.load(words_at(page, lanes * 0), mask=lanes == 0, other=0, volatile=True)
        failed = tl.load(words_at(flags, STICKY + lanes * 0), lanes == 0, other=0, volatile=True)
        late = (waited > limit_ns) | ((abort == 2) & (waited > HURRY_NS))
        stop = tl.max((late | (abort == 1) | (failed != 0)).to(tl.int32))
    return stop


@triton.jit
def wait(
    pointers, wanted, active, flags, STICKY: tl.constexpr, limit_ns, page, lanes,
    TARGET: tl.constexpr,
):  # fmt: skip
    """1 once every active flag has reached ``wanted``; 0 if that is given up (``must_stop``).

    lanes: [threads of the block] their numbers; pointers, active: [threads].
    """
    seen = load_acquire(pointers, active, TARGET)
    reached = tl.min(tl.where(active & (seen - wanted < 0), 0, 1))
    stop = 0
    if reached == 0:
        start = clock(lanes, TARGET)
        turns = 0
        while (reached == 0) & (stop == 0):
            seen = load_acquire(pointers, active, TARGET)
            reached = tl.min(tl.where(active & (seen - wanted < 0), 0, 1))
            turns += 1
            if reached == 0:
                stop = must_stop(turns, start, flags, STICKY, limit_ns, page, lanes, TARGET)
    return reached


@triton.jit
def report(
    flags, STICKY: tl.constexpr, page, code, kind, sequence, late, lanes, sent=0, expected=0,
    tag=0, wanted=0,
):  # fmt: skip
    """Make this rank's failure stick and tell its host, once: what comes first is the cause. Words
    of the page: abort, code, kind, sequence, from 8 on one per rank (0/1) of who was late, from 24
    on the four numbers of a mismatch, int64.
    """
    if tl.atomic_xchg(words_at(flags, STICKY), 1) == 0:
        tl.store(longs_at(page, 96), sent)
        tl.store(longs_at(page, 104), expected)
        tl.store(longs_at(page, 112), tag)
        tl.store(longs_at(page, 120), wanted)
        tl.store(words_at(page, 8), kind)
        tl.store(words_at(page, 12), sequence)
        tl.store(words_at(page, 32) + lanes, late, mask=lanes < 16)
        tl.debug_barrier()
        tl.atomic_xchg(words_at(page, 4), code, sem="release", scope="sys")


@triton.jit
def advance(flags, OFFSET: tl.constexpr, MAX_BLOCKS: tl.constexpr, value):
    """Set the sequence number of the launch: each block writes the copies that are its own, so
    that none is read by another block while it changes.
    """
    copies = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, MAX_BLOCKS)
    tl.store(words_at(flags, OFFSET) + copies, value, mask=copies < MAX_BLOCKS)
