"""Number formats of weights in integer arithmetic: e2m1, e8m0, e4m3 to bf16, exact.

The same source on every target (``e4m3_consecutive`` but for NVIDIA's), and in the interpreter,
whose own conversions are wrong. Weights stay in the 32-bit words they were loaded in: two codes at
a time become two bf16 in one word, by moving their bits to where bf16 has its own, which reads as a
power of two less (subnormals too); one multiplication puts that right.

Symbols: word i holds codes k = P*i .. P*i + P-1, P = 8 (e2m1) or 4 (e4m3), the first lowest. Pair
J holds codes J and J + P/2 of a word. So pair J of all words, both halves in turn, is the slice
k = J, J + P/2, J + P, ... of a row.
Sources: OCP Microscaling Formats 1.0 (e2m1, e8m0), OCP 8-bit Floating Point 1.0 (e4m3).
"""

import triton
import triton.language as tl

# bf16 has a bias of 127, e2m1 of 1, e4m3 of 7. A pair: the same bf16 twice in a word.
E2M1_FACTOR = tl.constexpr(2.0**126)
E2M1_FACTOR_PAIR = tl.constexpr(0x7E807E80)
E4M3_FACTOR = tl.constexpr(2.0**120)
E4M3_FACTOR_PAIR = tl.constexpr(0x7B807B80)


@triton.jit
def e2m1_pair(words, J: tl.constexpr):
    """Pair J (0 to 3) of uint32 words as two bf16, each 2**-126 of its value."""
    if J >= 2:
        words = words >> 8
    if J % 2 == 0:
        moved = (words & 0x000F000F) * 0x1040  # the code at bit 12, for its sign, and at bit 6
    else:
        moved = (words & 0x00F000F0) * 0x0104
    return moved & 0x81C081C0


@triton.jit
def e4m3_pair(words, J: tl.constexpr):
    """Pair J (0 or 1) of uint32 words as two bf16, each 2**-120 of its value; NaN is NaN."""
    if J == 0:
        sign, rest = words << 8, words << 4
    else:
        sign, rest = words, words >> 4
    rest = rest & 0x07F007F0
    nan = (rest + 0x00100010) & 0x08000800  # only 0x7F carries into bit 11
    return (sign & 0x80008000) | (rest + nan * 15)


@triton.jit
def e8m0_pair(codes):
    """uint8 exponents as the same bf16 twice in a uint32: 2**(code - 127), 255 is NaN."""
    wide = codes.to(tl.uint32)
    pair = wide * 0x00800080
    # 0 is the subnormal 2**-127, 255 would be infinity: both want the upper bit of the fraction.
    return tl.where(((wide + 1) & 0xFE) == 0, pair | 0x00400040, pair)


@triton.jit
def halves(pair):
    """The lower and the upper bf16 of uint32 words."""
    low = pair.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (pair >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def in_turn(pair):
    """[R, W] words to [R, 2 W] bf16: the halves of each word in turn."""
    low, high = halves(pair)
    return tl.join(low, high).reshape([pair.shape[0], 2 * pair.shape[1]])


@triton.jit
def multiplied(pair, factor):
    """Two bf16 in a word times two others, by fp32; the products must be bf16 numbers."""
    low = (pair << 16).to(tl.float32, bitcast=True)
    low *= (factor << 16).to(tl.float32, bitcast=True)
    high = (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
    high *= (factor & 0xFFFF0000).to(tl.float32, bitcast=True)
    upper = high.to(tl.uint32, bitcast=True) & 0xFFFF0000
    return (low.to(tl.uint32, bitcast=True) >> 16) | upper


@triton.jit
def e2m1_values(words, J: tl.constexpr, scale, TARGET: tl.constexpr):
    """[R, W] uint32 and the scale of each word (``e8m0_pair``) to pair J, [R, 2 W] bf16.

    Two multiplications, since 2**126 times a scale may be more than a bf16 holds.
    """
    pair = e2m1_pair(words, J)
    if TARGET == "cuda":
        values = (
            in_turn(pair) * tl.full([], E2M1_FACTOR, tl.float32).to(tl.bfloat16) * in_turn(scale)
        )
    else:  # where bf16 products are rounded at length (AMD) or wrong (the interpreter)
        pair = multiplied(pair, tl.full(pair.shape, E2M1_FACTOR_PAIR, tl.uint32))
        values = in_turn(multiplied(pair, scale))
    return values


@triton.jit
def e4m3_values(words, J: tl.constexpr, TARGET: tl.constexpr):
    """[R, W] uint32 to pair J, [R, 2 W] bf16."""
    pair = e4m3_pair(words, J)
    if TARGET == "cuda":
        values = in_turn(pair) * tl.full([], E4M3_FACTOR, tl.float32).to(tl.bfloat16)
    else:
        values = in_turn(multiplied(pair, tl.full(pair.shape, E4M3_FACTOR_PAIR, tl.uint32)))
    return values


@triton.jit
def e4m3_consecutive(words, TARGET: tl.constexpr):
    """uint32 words as two pairs of bf16: codes 0 and 1 of each, codes 2 and 3. On NVIDIA GPUs by
    instructions of sm_89 and later.
    """
    if TARGET == "cuda":
        first, second = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 codes<2>, half<4>;
            .reg .b32 pair<2>;
            .reg .f32 value<4>;
            mov.b32 {codes0, codes1}, $2;
            cvt.rn.f16x2.e4m3x2 pair0, codes0;
            cvt.rn.f16x2.e4m3x2 pair1, codes1;
            mov.b32 {half0, half1}, pair0;
            mov.b32 {half2, half3}, pair1;
            cvt.f32.f16 value0, half0;
            cvt.f32.f16 value1, half1;
            cvt.f32.f16 value2, half2;
            cvt.f32.f16 value3, half3;
            cvt.rn.bf16x2.f32 $0, value1, value0;
            cvt.rn.bf16x2.f32 $1, value3, value2;
            }
            """,
            "=r,=r,r",
            [words],
            (tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        factor = tl.full(words.shape, E4M3_FACTOR_PAIR, tl.uint32)
        even = multiplied(e4m3_pair(words, 0), factor)
        odd = multiplied(e4m3_pair(words, 1), factor)
        first, second = (even & 0xFFFF) | (odd << 16), (even >> 16) | (odd & 0xFFFF0000)
    return first, second


@triton.jit
def dot(a, b, acc, TARGET: tl.constexpr):
    """acc [..., R, C] fp32 + a [..., R, K] times b [..., C, K] transposed, both bf16."""
    if TARGET == "interpret":  # widened by hand: it does not know bf16, nor its subnormals
        a = (a.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        b = (b.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    if len(b.shape) == 2:
        b = tl.trans(b)
    else:
        b = tl.permute(b, (0, 2, 1))
    return tl.dot(a, b, acc, input_precision="ieee")
