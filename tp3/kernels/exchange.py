"""Bytes between pairs of ranks: every collective that only moves data, and messages, in one launch.

Two ranks have, in each direction, C channels: rings of ``DEPTH`` chunks in the receiver's memory,
each with a count of chunks that arrived (written by the sender) and one of chunks acknowledged
(written by the receiver into the sender's memory). Chunk n of a message travels on channel
``n % c``, where c = min(limit, chunks of the message) follows from its size alone, so both ends
agree whatever their grids and word sizes are. Counts only rise and never restart; a channel has one
writer and one reader, which makes any sequence of messages safe as long as both ends see them in
the same order.

The first chunk carries the size and the tag of its message; a receiver that expects others fails
and fills its output with ones.

Lanes: grid axis 0 holds lane 0..W-1 "send to that rank" (the own rank: copy locally) and W..2W-1
"receive from that rank"; axis 1 holds the channels. All blocks of a launch must fit on the GPU at
once, with those of the other ranks on it: a sender waits for the receiver of another rank.
"""

import triton
import triton.language as tl

from tp3.kernels.primitives import (
    MISMATCH,
    TIMED_OUT,
    longs_at,
    report,
    store_release,
    wait,
    words_at,
)

KIND = tl.constexpr(4)


@triton.jit
def elements_at(address, WORD: tl.constexpr, ALIGN: tl.constexpr):
    """Pointer to words at an address that is a multiple of ``ALIGN`` bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(WORD)), ALIGN)


@triton.jit
def copy_words(target, source, count, TILE: tl.constexpr, CACHE: tl.constexpr):
    """``count`` words from source to target, by this block."""
    for start in range(0, count, TILE):
        offsets = start + tl.arange(0, TILE)
        inside = offsets < count
        tl.store(target + offsets, tl.load(source + offsets, inside, cache_modifier=CACHE), inside)


@triton.jit(
    do_not_specialize=[
        "flags", "sources", "source_stride", "targets", "target_stride", "num_bytes", "sizes",
        "first_lane", "tag", "channel_set", "limit", "rank", "limit_ns", "page",
    ]
)  # fmt: skip
def exchange_kernel(
    flags: tl.int64,  # address of this rank's flags
    sources: tl.int64,  # address of what goes to rank 0, the others source_stride bytes apart
    source_stride: tl.int64,
    targets: tl.int64,  # address of what comes from rank 0, written
    target_stride: tl.int64,
    num_bytes: tl.int64,  # of each message
    sizes: tl.int64,  # TABLE only: address of int64 [2 W, 2]: address and bytes for each lane
    first_lane: tl.int64,  # lane of program_id(0) == 0
    tag: tl.int64,
    channel_set: tl.int64,
    limit: tl.int64,  # how many channels may be used, alike on both ends
    rank: tl.int64,
    limit_ns: tl.int64,
    page: tl.int64,  # address of the host's page
    TABLE: tl.constexpr,
    WORD: tl.constexpr,  # integer dtype that all addresses and sizes here are multiples of
    VECTOR: tl.constexpr,  # bytes that they are multiples of; 16 with 8-byte words
    WORLD: tl.constexpr,
    CHANNELS: tl.constexpr,  # of a set and direction
    CHUNK: tl.constexpr,  # bytes
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,  # words
    LANES: tl.constexpr,
    RINGS: tl.constexpr,
    STICKY: tl.constexpr,
    COUNTS: tl.constexpr,  # DeviceLayout.channel_words
    TARGET: tl.constexpr,
):
    """>>> all-gather of [1], [2]: lane 0 of rank 0 copies, 1 sends [1], 3 receives [2]: [1, 2]"""
    ITEM: tl.constexpr = WORD.primitive_bitwidth // 8
    PER: tl.constexpr = 2 * WORLD * CHANNELS
    lane = tl.program_id(0) + first_lane
    channel = tl.program_id(1)
    lanes = tl.arange(0, LANES)
    one = lanes == 0
    table = flags.to(tl.pointer_type(tl.int64))
    sending = lane < WORLD
    peer = tl.where(sending, lane, lane - WORLD)
    if TABLE:
        address = tl.load(longs_at(sizes, 16 * lane))
        count = tl.load(longs_at(sizes, 16 * lane + 8))
    else:
        address = tl.where(sending, sources + peer * source_stride, targets + peer * target_stride)
        count = num_bytes
    chunks = tl.cdiv(count, CHUNK)
    used = tl.minimum(chunks, limit)
    alive = (tl.load(words_at(flags, STICKY)) == 0).to(tl.int32)
    if channel < used:
        # The index of this channel's words, here and at the peer.
        my = (channel_set * WORLD + peer) * CHANNELS + channel
        its = (channel_set * WORLD + rank) * CHANNELS + channel
        turns = tl.cdiv(chunks - channel, used).to(tl.int32)
        if peer == rank:
            target = targets + rank * target_stride
            if TABLE:
                target = tl.load(longs_at(sizes, 16 * (WORLD + rank)))
            if sending & (target != address):
                for turn in range(turns):
                    begin = (turn * used + channel) * CHUNK
                    size = tl.minimum(count - begin, CHUNK)
                    copy_words(
                        elements_at(target + begin, WORD, VECTOR),
                        elements_at(address + begin, WORD, VECTOR),
                        (size // VECTOR).to(tl.int32) * (VECTOR // ITEM),
                        TILE,
                        "",
                    )
        else:
            peer_flags = tl.load(table + peer)
            if sending:
                done = tl.load(words_at(flags, COUNTS) + my)
                acked = words_at(flags, COUNTS + 12 * PER) + my + lanes * 0
                ring = tl.load(table + WORLD + peer) + RINGS
                ring += (
                    (channel_set * (WORLD - 1) + rank - (rank > peer)) * CHANNELS + channel
                ).to(tl.int64) * (DEPTH * CHUNK)
                for turn in range(turns):
                    if alive == 1:
                        done += 1
                        alive = wait(
                            acked, done - DEPTH, one, flags, STICKY, limit_ns, page, lanes, TARGET
                        )
                        if alive == 0:
                            late = (lanes == peer).to(tl.int32)
                            report(flags, STICKY, page, TIMED_OUT, KIND, done, late, lanes)
                    if alive == 1:
                        begin = (turn * used + channel) * CHUNK
                        size = tl.minimum(count - begin, CHUNK)
                        copy_words(
                            elements_at(ring + ((done - 1) & (DEPTH - 1)) * CHUNK, WORD, VECTOR),
                            elements_at(address + begin, WORD, VECTOR),
                            (size // VECTOR).to(tl.int32) * (VECTOR // ITEM),
                            TILE,
                            "",
                        )
                        if turn == 0:
                            header = longs_at(peer_flags, COUNTS + 16 * PER)
                            header += 2 * (its * DEPTH + ((done - 1) & (DEPTH - 1)))
                            tl.store(header, count)
                            tl.store(header + 1, tag)
                        arrived = words_at(peer_flags, COUNTS + 8 * PER) + its + lanes * 0
                        store_release(arrived, done, one, TARGET)
                tl.store(words_at(flags, COUNTS) + my, done)
            else:
                done = tl.load(words_at(flags, COUNTS + 4 * PER) + my)
                arrived = words_at(flags, COUNTS + 8 * PER) + my + lanes * 0
                ring = tl.load(table + WORLD + rank) + RINGS
                ring += (
                    (channel_set * (WORLD - 1) + peer - (peer > rank)) * CHANNELS + channel
                ).to(tl.int64) * (DEPTH * CHUNK)
                for turn in range(turns):
                    begin = (turn * used + channel) * CHUNK
                    size = tl.minimum(count - begin, CHUNK)
                    words = (size // VECTOR).to(tl.int32) * (VECTOR // ITEM)
                    if alive == 1:
                        done += 1
                        alive = wait(
                            arrived, done, one, flags, STICKY, limit_ns, page, lanes, TARGET
                        )
                        if alive == 0:
                            late = (lanes == peer).to(tl.int32)
                            report(flags, STICKY, page, TIMED_OUT, KIND, done, late, lanes)
                        elif turn == 0:
                            header = longs_at(flags, COUNTS + 16 * PER)
                            header += 2 * (my * DEPTH + ((done - 1) & (DEPTH - 1)))
                            theirs = tl.load(header, volatile=True)
                            label = tl.load(header + 1, volatile=True)
                            if (theirs != count) | (label != tag):
                                alive = 0
                                late = (lanes == peer).to(tl.int32)
                                report(
                                    flags, STICKY, page, MISMATCH, KIND, done, late, lanes, theirs,
                                    count, label, tag,
                                )  # fmt: skip
                    if alive == 1:
                        copy_words(
                            elements_at(address + begin, WORD, VECTOR),
                            elements_at(ring + ((done - 1) & (DEPTH - 1)) * CHUNK, WORD, VECTOR),
                            words,
                            TILE,
                            ".cg",
                        )
                        acked = words_at(peer_flags, COUNTS + 12 * PER) + its + lanes * 0
                        store_release(acked, done, one, TARGET)
                    else:
                        target = elements_at(address + begin, WORD, VECTOR)
                        for start in range(0, words, TILE):
                            offsets = start + tl.arange(0, TILE)
                            tl.store(target + offsets, tl.full([TILE], -1, WORD), offsets < words)
                tl.store(words_at(flags, COUNTS + 4 * PER) + my, done)
