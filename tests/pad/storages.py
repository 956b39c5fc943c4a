"""How each format stores a weight, written down a second time: numbers in, numbers out.

``make`` gives tensors by suffix for a weight of rows × columns, ``read`` the weight they mean. Only
torch, no code of the package: what the tests of padded checkpoints are held to.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def repeated(scales, rows, columns, shape):
    """A scale for each block, cut to the weight's shape."""
    wide = scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: shape[0], : shape[1]]


def blocks(size, block):
    return -(-size // block)


@dataclass
class Fp8:
    """e4m3 with a scale per tensor, channel or block; rows or columns 0: all."""

    config: dict
    rows: int = 0
    columns: int = 0
    scale: str = "weight_scale"
    extra: tuple = ("input_scale",)
    spaced: bool = False  # [N/r, 1, K/c, 1], as ModelOpt writes them

    def make(self, n, k, g):
        grid = (blocks(n, self.rows or n), blocks(k, self.columns or k))
        shape = () if grid == (1, 1) and not self.rows else grid
        tensors = {
            "weight": torch.randn(n, k, generator=g).to(torch.float8_e4m3fn),
            self.scale: torch.rand(shape, generator=g) + 0.5,
        }
        if self.spaced:
            tensors[self.scale] = tensors[self.scale][:, None, :, None]
        return tensors | {name: torch.tensor(0.25) for name in self.extra}

    def read(self, t):
        weight, scale = t["weight"].double(), t[self.scale]
        scale = scale[:, 0, :, 0] if self.spaced else scale
        if scale.dim() == 0:
            return weight * scale.double()
        rows, columns = self.rows or weight.shape[0], self.columns or weight.shape[1]
        return weight * repeated(scale, rows, columns, weight.shape)


def nibbles(packed):
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


@dataclass
class Fp4:
    """e2m1 codes in pairs; scales e8m0 (block 32) or e4m3 under one more (block 16)."""

    config: dict
    block: int
    name: str = "weight"
    outer: str = ""

    def make(self, n, k, g):
        tensors = {self.name: torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)}
        grid = (n, k // self.block)
        if self.block == 32:
            scale = torch.randint(120, 130, grid, generator=g, dtype=torch.uint8)
        else:
            scale = (torch.rand(grid, generator=g) * 300 + 20).to(torch.float8_e4m3fn)
            tensors[self.outer] = torch.tensor([0.004])
            tensors["input_scale"] = torch.tensor([0.3])
        return tensors | {"weight_scale": scale}

    def read(self, t):
        codes = E2M1[nibbles(t[self.name]).long()]
        if self.block == 32:
            scale = torch.pow(2.0, t["weight_scale"].double() - 127)
        else:
            scale = t["weight_scale"].double() * t[self.outer].double()
            scale = scale if self.outer == "weight_scale_2" else scale / t[self.outer].double() ** 2
        return codes * repeated(scale, 1, self.block, codes.shape)


@dataclass
class Mxfp8:
    config: dict

    def make(self, n, k, g):
        return {
            "weight": torch.randn(n, k, generator=g).to(torch.float8_e4m3fn),
            "weight_scale": torch.randint(120, 130, (n, k // 32), generator=g, dtype=torch.uint8),
        }

    def read(self, t):
        weight = t["weight"].double()
        scale = torch.pow(2.0, t["weight_scale"].double() - 127)
        return weight * repeated(scale, 1, 32, weight.shape)


def pack(codes, bits, dim, order=None):
    """Integers into words of 32 bits along a dimension."""
    each = 32 // bits
    codes = codes.long().movedim(dim, -1).unflatten(-1, (-1, each))
    if order:
        codes = codes[..., list(order)]
    words = (codes << (torch.arange(each) * bits)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def unpack(words, bits, dim, order=None):
    each = 32 // bits
    words = words.long().movedim(dim, -1)[..., None]
    codes = (words >> (torch.arange(each) * bits)) & ((1 << bits) - 1)
    if order:
        codes = codes[..., [order.index(i) for i in range(each)]]
    return codes.flatten(-2).movedim(-1, dim)


@dataclass
class Gptq:
    """qweight [K/p, N], qzeros [G, N/p] (less offset), scales [G, N], g_idx [K]."""

    config: dict
    bits: int = 4
    group: int = 128
    symmetric: bool = True
    act_order: bool = False
    offset: int = 1

    def make(self, n, k, g):
        count, top = blocks(k, self.group or k), 1 << self.bits
        codes = torch.randint(0, top, (k, n), generator=g)
        zeros = torch.full((count, n), top // 2)
        if not self.symmetric:
            zeros = torch.randint(1, top, (count, n), generator=g)
        groups = torch.arange(k) // (self.group or k)
        if self.act_order:
            groups = groups[torch.randperm(k, generator=g)]
        return {
            "qweight": pack(codes, self.bits, 0),
            "qzeros": pack(zeros - self.offset, self.bits, 1),
            "scales": (torch.rand(count, n, generator=g) + 0.5).half(),
            "g_idx": groups.int(),
        }

    def read(self, t):
        groups = t["g_idx"].long()
        codes = unpack(t["qweight"], self.bits, 0)
        zeros = unpack(t["qzeros"], self.bits, 1) + self.offset
        if not self.act_order and self.group:
            assert torch.equal(groups, torch.arange(len(groups)) // self.group)
        return ((codes - zeros[groups]) * t["scales"].double()[groups]).T


@dataclass
class Awq:
    config: dict

    def make(self, n, k, g):
        codes = torch.randint(0, 16, (k, n), generator=g)
        zeros = torch.randint(0, 16, (k // 128, n), generator=g)
        return {
            "qweight": pack(codes, 4, 1, AWQ_ORDER),
            "qzeros": pack(zeros, 4, 1, AWQ_ORDER),
            "scales": (torch.rand(k // 128, n, generator=g) + 0.5).half(),
        }

    def read(self, t):
        codes = unpack(t["qweight"], 4, 1, AWQ_ORDER)
        zeros = unpack(t["qzeros"], 4, 1, AWQ_ORDER).repeat_interleave(128, 0)
        return ((codes - zeros) * t["scales"].double().repeat_interleave(128, 0)).T


@dataclass
class Packed:
    """compressed-tensors: offset binary, words along K; zero points, if any, along N."""

    config: dict
    bits: int = 4
    group: int = 128
    symmetric: bool = True
    seen: list = field(default_factory=list)

    def make(self, n, k, g):
        middle, count = 1 << (self.bits - 1), blocks(k, self.group or k)
        tensors = {
            "weight_packed": pack(torch.randint(0, 2 * middle, (n, k), generator=g), self.bits, 1),
            "weight_scale": torch.rand(n, count, generator=g) + 0.5,
            "weight_shape": torch.tensor([n, k]),
        }
        if not self.symmetric:
            zeros = torch.randint(0, 2 * middle, (n, count), generator=g)
            tensors["weight_zero_point"] = pack(zeros, self.bits, 0)
        return tensors

    def read(self, t):
        codes = unpack(t["weight_packed"], self.bits, 1)
        assert list(codes.shape) == t["weight_shape"].tolist()
        group = self.group or codes.shape[1]
        zeros = torch.full(t["weight_scale"].shape, 1 << (self.bits - 1))
        if not self.symmetric:
            zeros = unpack(t["weight_zero_point"], self.bits, 0)
        zeros = repeated(zeros, 1, group, codes.shape)
        return (codes - zeros) * repeated(t["weight_scale"], 1, group, codes.shape)
