"""MXFP4: E2M1 codes in groups of 32 along the input, one E8M0 scale byte a group."""

import torch

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scale_exponent(grouped):
    """Exponent of each group's scale: the largest magnitude rounded to a power of two (up from
    1.75), less 2, so that it lands on the codes 4 and 6."""
    top = grouped.abs().amax(-1, keepdim=True)
    fraction, exponent = torch.frexp(top)  # top = fraction * 2^exponent, fraction in [.5, 1)
    exponent = exponent - 1 + (fraction >= 0.875).to(exponent.dtype) - 2
    return torch.where(top > 0, exponent, torch.zeros_like(exponent)).clamp_(-127, 127)


def round_e2m1(x):
    """Nearest E2M1 magnitude of x >= 0 already clamped to 6, ties to the even code."""
    step = 0.5 + 0.5 * (x >= 2).to(x.dtype) + (x >= 4).to(x.dtype)
    return torch.round(x / step).mul_(step)


def fake_quantise(w):
    """The value each weight has once stored; same shape and type as w."""
    g = w.reshape(-1, GROUP)
    scale = torch.ldexp(torch.ones((), dtype=w.dtype), scale_exponent(g))
    x = (g / scale).clamp_(-6, 6)
    return round_e2m1(x.abs()).copysign_(x).mul_(scale).view_as(w)


class StraightThrough(torch.autograd.Function):
    """fake_quantise with the gradient of the identity."""

    @staticmethod
    def forward(ctx, w):
        return fake_quantise(w)

    @staticmethod
    def backward(ctx, grad):
        return grad


def pack(w):
    """w[..., out, in] to (packed[..., out, in/2], scale[..., out, in/32]), both uint8."""
    g = w.float().reshape(*w.shape[:-1], -1, GROUP)
    exponent = scale_exponent(g)
    x = (g / torch.ldexp(torch.ones(()), exponent)).clamp_(-6, 6)
    codes = torch.searchsorted(torch.tensor(E2M1), round_e2m1(x.abs()).contiguous())
    codes = (codes + 8 * (x < 0).long()).view(w.shape)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed.to(torch.uint8), (exponent.squeeze(-1) + 127).to(torch.uint8)


def unpack(packed, scale, dtype=torch.float32):
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    value = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=dtype)[codes]
    factor = torch.ldexp(torch.ones((), dtype=dtype), scale.long() - 127)
    return (value.unflatten(-1, (-1, GROUP)) * factor.unsqueeze(-1)).flatten(-2)
