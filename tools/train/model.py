"""The Kimi K3 text architecture in plain PyTorch: training in float32, oracle in float64.

Shapes: B sequences of T tokens, H hidden width. Parameter names follow the released checkpoint;
the routed experts of a layer are held as three stacked tensors w1, w2, w3 [expert, out, in]."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import mxfp4

L2_EPS = 1e-6
LORA_NORM_EPS = 1e-6  # the two norms inside MLA do not use rms_norm_eps
CHUNK = 16  # a decay of e^-5 a token keeps e^(sum) of a chunk within float32


def rms(x, eps):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return x * rms(x, self.eps) * self.weight


def linear(rows, cols, gain=1.0):
    layer = nn.Linear(cols, rows, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(cols))
    return layer


def situ(gate, up, cfg):
    b1, b2 = cfg["activation_situ_beta"], cfg["activation_situ_linear_beta"]
    return b1 * torch.tanh(gate / b1) * torch.sigmoid(gate) * (b2 * torch.tanh(up / b2))


class Mlp(nn.Module):
    def __init__(self, cfg, width):
        super().__init__()
        self.cfg = cfg
        self.gate_proj = linear(width, cfg["hidden_size"])
        self.up_proj = linear(width, cfg["hidden_size"])
        self.down_proj = linear(cfg["hidden_size"], width, 0.5)

    def forward(self, x):
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.cfg))


def kda_chunks(q, k, v, g, beta):
    """Delta rule with per-channel decay, evaluated chunk by chunk.

    q, k, g [B, heads, T, dk], v [B, heads, T, dv], beta [B, heads, T]; g is the logarithm of the
    decay. Returns o [B, heads, T, dv]."""
    batch, heads, length, dk = q.shape
    pad = -length % CHUNK
    if pad:
        q, k, v, g = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v, g))
        beta = F.pad(beta, (0, pad))
    n = (length + pad) // CHUNK
    q, k, v, g = (x.reshape(batch * heads * n, CHUNK, -1) for x in (q, k, v, g))
    beta = beta.reshape(batch * heads * n, CHUNK, 1)
    c = g.cumsum(1)
    # Within a chunk every exponent is taken from the middle row's, which halves its range; the
    # entries above the diagonal are dropped before they are read.
    mid = c[:, CHUNK // 2 : CHUNK // 2 + 1]
    near, far = torch.exp(c - mid), torch.exp(mid - c)
    k_far = (k * far).transpose(1, 2)
    strict = (beta * ((k * near) @ k_far)).tril(-1)
    attend = ((q * near) @ k_far).tril()
    decay = torch.exp(c)
    k_plus, q_plus = k * decay, q * decay
    last = c[:, -1:]
    k_out = (k * torch.exp(last - c)).transpose(1, 2)
    solved = torch.linalg.solve_triangular(
        strict + torch.eye(CHUNK, dtype=q.dtype),
        torch.cat((beta * v, beta * k_plus), -1),
        upper=False,
        unitriangular=True,
    )
    tv, tk = solved.split((v.shape[-1], dk), -1)

    def steps(x):
        return x.reshape(batch * heads, n, *x.shape[1:]).unbind(1)

    state = q.new_zeros(batch * heads, dk, v.shape[-1])
    out = []
    for tv_i, tk_i, q_i, a_i, k_i, last_i in zip(
        steps(tv), steps(tk), steps(q_plus), steps(attend), steps(k_out), steps(last)
    ):
        fresh = torch.baddbmm(tv_i, tk_i, state, alpha=-1)
        out.append(torch.baddbmm(torch.bmm(a_i, fresh), q_i, state))
        state = torch.baddbmm(state * torch.exp(last_i).transpose(1, 2), k_i, fresh)
    out = torch.stack(out, 1).reshape(batch, heads, length + pad, -1)
    return out[:, :, :length]


class Kda(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        lin, hidden = cfg["linear_attn_config"], cfg["hidden_size"]
        self.heads, self.dim = lin["num_heads"], lin["head_dim"]
        self.bound, self.kernel = lin["gate_lower_bound"], lin["short_conv_kernel_size"]
        width = self.heads * self.dim
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (
            linear(width, hidden) for _ in range(4)
        )
        self.o_proj = linear(hidden, width, 0.5)
        for name in "qkv":
            conv = nn.Conv1d(width, width, self.kernel, groups=width, bias=False)
            self.add_module(name + "_conv1d", conv)
        self.start_copying()
        self.f_a_proj, self.f_b_proj = linear(self.dim, hidden), linear(width, self.dim)
        self.b_proj = linear(self.heads, hidden)
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(0.7, 1.4).log_())
        self.dt_bias = nn.Parameter(torch.empty(width).uniform_(-8.0, -2.0))
        self.o_norm = RMSNorm(self.dim, cfg["rms_norm_eps"])

    @torch.no_grad()
    def start_copying(self):
        """Start as heads that look up the current token among those stored (every second head: what
        followed it) and put out what they find: a small model is slow to find that by itself, and
        learns little from a question before it has."""
        for conv, tap in ((self.q_conv1d, -1), (self.k_conv1d, -1), (self.v_conv1d, -1)):
            conv.weight.mul_(0.3)[:, 0, tap] += 1
        for head in range(0, self.heads, 2):
            taps = self.k_conv1d.weight[head * self.dim : (head + 1) * self.dim, 0]
            taps.copy_(taps.roll(-1, 1))
        self.k_proj.weight.copy_(self.q_proj.weight)
        self.o_proj.weight.copy_(0.5 * self.v_proj.weight.t())

    def conv(self, x, conv):
        taps = conv.weight[:, 0]
        padded = F.pad(x, (0, 0, self.kernel - 1, 0))
        length = x.shape[1]
        return F.silu(
            sum(padded[:, i : i + length] * taps[:, i] for i in range(self.kernel))
        )

    def forward(self, x):
        batch, length, _ = x.shape

        def split(t):
            return t.view(batch, length, self.heads, self.dim).transpose(1, 2)

        def unit(t):
            return t * torch.rsqrt(t.pow(2).sum(-1, keepdim=True) + L2_EPS)

        q = unit(split(self.conv(self.q_proj(x), self.q_conv1d))) * self.dim**-0.5
        k = unit(split(self.conv(self.k_proj(x), self.k_conv1d)))
        v = split(self.conv(self.v_proj(x), self.v_conv1d))
        z = split(self.f_b_proj(self.f_a_proj(x)) + self.dt_bias)
        g = self.bound * torch.sigmoid(self.A_log.exp().view(-1, 1, 1) * z)
        beta = torch.sigmoid(self.b_proj(x)).transpose(1, 2)
        o = self.o_norm(kda_chunks(q, k, v, g, beta))
        o = o.transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(o * torch.sigmoid(self.g_proj(x)))


class Mla(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        hidden = cfg["hidden_size"]
        self.heads, self.nope = cfg["num_attention_heads"], cfg["qk_nope_head_dim"]
        self.rope, self.v_dim = cfg["qk_rope_head_dim"], cfg["v_head_dim"]
        self.latent = cfg["kv_lora_rank"]
        self.q_a_proj = linear(cfg["q_lora_rank"], hidden)
        self.q_a_layernorm = RMSNorm(cfg["q_lora_rank"], LORA_NORM_EPS)
        self.q_b_proj = linear(self.heads * (self.nope + self.rope), cfg["q_lora_rank"])
        self.kv_a_proj_with_mqa = linear(self.latent + self.rope, hidden)
        self.kv_a_layernorm = RMSNorm(self.latent, LORA_NORM_EPS)
        self.kv_b_proj = linear(self.heads * (self.nope + self.v_dim), self.latent)
        self.g_proj = linear(self.heads * self.v_dim, hidden)
        self.o_proj = linear(hidden, self.heads * self.v_dim, 0.5)
        with torch.no_grad():  # start by putting out the tokens attended to, as in Kda.start_copying
            values = self.kv_b_proj.weight.view(self.heads, -1, self.latent)[:, self.nope :].flatten(0, 1)
            self.o_proj.weight.copy_(0.5 * (values @ self.kv_a_proj_with_mqa.weight[: self.latent]).t())

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(batch, length, self.heads, -1).transpose(1, 2)
        c, r = self.kv_a_proj_with_mqa(x).split((self.latent, self.rope), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(c))
        kv = kv.view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = kv.split((self.nope, self.v_dim), -1)
        k = torch.cat((k, r.unsqueeze(1).expand(-1, self.heads, -1, -1)), -1)
        score = q @ k.transpose(2, 3) * (self.nope + self.rope) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        p = score.masked_fill(future, float("-inf")).softmax(-1)
        o = (p @ v).transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(o * torch.sigmoid(self.g_proj(x)))


class GroupedLinear(torch.autograd.Function):
    """y[r] = w[expert of r] x[r], the rows of x sorted by expert; ends[e] is one past the last
    row of expert e."""

    @staticmethod
    def forward(ctx, x, w, ends):
        ctx.save_for_backward(x, w)
        ctx.ends = ends
        y = x.new_empty(x.shape[0], w.shape[1])
        start = 0
        for e, end in enumerate(ends):
            if end > start:
                torch.mm(x[start:end], w[e].t(), out=y[start:end])
            start = end
        return y

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = grad.contiguous()
        dx, dw = torch.empty_like(x), torch.zeros_like(w)
        start = 0
        for e, end in enumerate(ctx.ends):
            if end > start:
                torch.mm(grad[start:end], w[e], out=dx[start:end])
                torch.mm(grad[start:end].t(), x[start:end], out=dw[e])
            start = end
        return dx, dw, None


class LatentMoe(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        hidden, experts = cfg["hidden_size"], cfg["num_experts"]
        latent, width = cfg["routed_expert_hidden_size"], cfg["moe_intermediate_size"]
        self.top_k = cfg["num_experts_per_token"]
        self.gate = linear(experts, hidden, 0.5)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.routed_expert_down_proj = linear(latent, hidden)
        if cfg["latent_moe_use_norm"]:
            self.routed_expert_norm = RMSNorm(latent, cfg["rms_norm_eps"])
        self.routed_expert_up_proj = linear(hidden, latent, 0.5)
        self.shared_experts = Mlp(cfg, width * cfg["num_shared_experts"])
        self.w1 = nn.Parameter(torch.randn(experts, width, latent) / math.sqrt(latent))
        self.w3 = nn.Parameter(torch.randn(experts, width, latent) / math.sqrt(latent))
        self.w2 = nn.Parameter(torch.randn(experts, latent, width) / math.sqrt(width))
        self.quantise = False
        self.load = torch.zeros(experts, dtype=torch.long)  # tokens of the last forward pass

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        score = torch.sigmoid(self.gate(x))
        with torch.no_grad():
            chosen = (score + self.gate.e_score_correction_bias).topk(self.top_k, -1).indices
            expert, order = chosen.flatten().sort(stable=True)
            self.load = torch.bincount(expert, minlength=score.shape[1])
            ends = self.load.cumsum(0).tolist()
            token = order // self.top_k
        weight = score.gather(1, chosen)
        if self.cfg["moe_renormalize"]:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        weight = (weight * self.cfg["routed_scaling_factor"]).flatten()[order]
        store = mxfp4.StraightThrough.apply if self.quantise else (lambda w: w)
        rows = self.routed_expert_down_proj(x)[token]
        gate = GroupedLinear.apply(rows, store(self.w1), ends)
        up = GroupedLinear.apply(rows, store(self.w3), ends)
        y = GroupedLinear.apply(situ(gate, up, self.cfg), store(self.w2), ends)
        y = y * weight.unsqueeze(1)
        total = y.new_zeros(x.shape[0], y.shape[1]).index_add(0, token, y)
        if self.cfg["latent_moe_use_norm"]:
            total = self.routed_expert_norm(total)
        return (self.routed_expert_up_proj(total) + self.shared_experts(x)).view(shape)


class Mixer(nn.Module):
    """Attention over the depth: a softmax mixture of the snapshots and the running sum."""

    def __init__(self, cfg):
        super().__init__()
        self.norm = RMSNorm(cfg["hidden_size"], cfg["rms_norm_eps"])
        self.proj = nn.Linear(cfg["hidden_size"], 1, bias=False)
        nn.init.zeros_(self.proj.weight)

    def forward(self, p, bank):
        """bank: (vector, 1 / rms of it) pairs."""
        if not bank:
            return p
        f = self.norm.weight * self.proj.weight[0]
        sources = [b for b, _ in bank] + [p]
        scales = [s for _, s in bank] + [rms(p, self.norm.eps)]
        a = torch.cat([(x @ f).unsqueeze(-1) * s for x, s in zip(sources, scales)], -1)
        alpha = a.softmax(-1).unbind(-1)
        return sum(w.unsqueeze(-1) * x for w, x in zip(alpha, sources))


class Layer(nn.Module):
    def __init__(self, cfg, index):
        super().__init__()
        hidden, eps = cfg["hidden_size"], cfg["rms_norm_eps"]
        self.reset = index % cfg["attn_res_block_size"] == 0
        mla = index + 1 in cfg["linear_attn_config"]["full_attn_layers"]
        self.self_attn = Mla(cfg) if mla else Kda(cfg)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attention_res = Mixer(cfg)
        self.mlp_res = Mixer(cfg)
        if index < cfg["first_k_dense_replace"]:
            self.mlp = Mlp(cfg, cfg["intermediate_size"])
        else:
            self.block_sparse_moe = LatentMoe(cfg)

    def forward(self, p, bank):
        y = self.self_attn(self.input_layernorm(self.self_attention_res(p, bank)))
        if self.reset:
            bank.append((p, rms(p, self.input_layernorm.eps)))
            p = y
        else:
            p = p + y
        ffn = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return p + ffn(self.post_attention_layernorm(self.mlp_res(p, bank)))


class K3(nn.Module):
    """cfg: the text_config object of config.json."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg["vocab_size"], cfg["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        self.layers = nn.ModuleList(
            Layer(cfg, i) for i in range(cfg["num_hidden_layers"])
        )
        self.output_attn_res = Mixer(cfg)
        self.norm = RMSNorm(cfg["hidden_size"], cfg["rms_norm_eps"])
        self.lm_head = linear(cfg["vocab_size"], cfg["hidden_size"], 0.3)
        with torch.no_grad():  # untied, but a token that is copied should begin by being said
            self.lm_head.weight.copy_(0.3 * self.embed_tokens.weight)

    def moe(self):
        return [m for m in self.modules() if isinstance(m, LatentMoe)]

    def forward(self, ids, where=None):
        """ids [B, T] to logits [B, T, vocabulary]; with where, a mask [B, T], only of the marked
        positions, [count, vocabulary]."""
        p, bank = self.embed_tokens(ids), []
        for layer in self.layers:
            p = layer(p, bank)
        if where is not None:
            p, bank = p[where], [(b[where], s[where]) for b, s in bank]
        return self.lm_head(self.norm(self.output_attn_res(p, bank)))
