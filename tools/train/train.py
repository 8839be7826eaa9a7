#!/usr/bin/python3
"""Train the demo model: tokenizer, corpus, training, checkpoint in the released layout.

    tools/train/train.py --work build/train --out models/demo

Data-parallel over --workers processes on shared memory. Interrupted, the same command goes on
from the last saved state. With --steps alone the result depends only on the seed, the number of
workers and the machine's arithmetic; --minutes makes the schedule follow the clock instead."""

import argparse
import json
import math
import os
import random
import time

import platform_settings  # noqa: F401  before torch
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

import checkpoint
import corpus
import tokenizer
from model import K3

RANKS = 4096
SIZE = {
    "hidden": 128, "layers": 13, "block": 4, "full_attn_layers": [4, 8, 12, 13],
    "kda_heads": 2, "kda_dim": 48, "mla_heads": 4, "nope": 24, "rope": 8, "v_dim": 24,
    "q_lora": 48, "kv_lora": 32, "dense": 256, "experts": 32, "top_k": 4, "shared": 2,
    "expert": 32, "latent": 64,
}
LEARNING_RATE, FLOOR, WARMUP = 5e-3, 0.02, 60
BETAS, ADAM_EPS, WEIGHT_DECAY, CLIP = (0.9, 0.97), 1e-9, 0.03, 1.0
BIAS_RATE = 0.003  # of the router's selection bias, per step


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--work", default="build/train", help="state, log and vocabulary")
    p.add_argument("--out", help="write the checkpoint here when done")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--steps", type=int, default=4000)
    p.add_argument("--minutes", type=float, help="the clock, not --steps, ends the schedule")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--save-every", type=float, default=180, help="seconds between saved states")
    p.add_argument("--export-only", action="store_true", help="write --out from the saved state")
    return p.parse_args()


def vocabulary(args):
    if not os.path.exists(os.path.join(args.work, "tiktoken.model")):
        os.makedirs(args.work, exist_ok=True)
        texts = corpus.vocabulary_texts(random.Random(args.seed), 20000)
        ranks = tokenizer.train(texts, RANKS)
        checkpoint.write_config(args.work, checkpoint.text_config(RANKS, **SIZE), ranks)
    return tokenizer.read(args.work)


IGNORED = -100


def targets(tok, ids):
    """ids with those that are given to the model, not said by it, replaced by IGNORED: in a chat,
    all but what follows the head of an assistant's message."""
    if ids[0] != tok.special["<|open|>"]:
        return ids
    head = tok.encode(corpus.opening("message", role="assistant"))
    end = tok.special["<|end_of_msg|>"]
    out, start = [], 0
    while start < len(ids):
        stop = ids.index(end, start) + 1 if end in ids[start:] else len(ids)
        said = ids[start : start + len(head)] == head
        given = len(head) + 3 if said else stop - start  # three more: the first channel's head
        out += [IGNORED] * given + ids[start + given : stop]
        start = stop
    return out


def batch(tok, rng, done):
    """Inputs and targets [rows, length]. A row begins with a whole document; its last is cut."""
    rows, length, mixture = corpus.shape(rng, done)
    inputs, wanted = [], []
    while len(inputs) < rows:
        ids, goal = [], []
        while len(ids) <= length:
            document = tok.encode(corpus.document(rng, mixture))
            if not ids and len(document) > length:
                continue
            ids += document
            goal += targets(tok, document)
        inputs.append(ids[:length])
        wanted.append(goal[1 : length + 1])
    return torch.tensor(inputs), torch.tensor(wanted)


class Shared:
    """What the workers share. params, m, v: all parameters in one vector; grads: one a worker."""

    def __init__(self, model, workers):
        total = sum(p.numel() for p in model.parameters())
        layers = model.moe()
        self.params = torch.zeros(total)
        self.m, self.v = torch.zeros(total), torch.zeros(total)
        self.grads = torch.zeros(workers, total)
        self.load = torch.zeros(workers, len(layers), layers[0].load.numel(), dtype=torch.long)
        self.bias = torch.zeros(len(layers), layers[0].load.numel())
        self.squares = torch.zeros(workers)
        self.loss = torch.zeros(workers)
        self.clock = torch.zeros(4, dtype=torch.float64)  # step, seconds, fraction done, stop
        for t in vars(self).values():
            t.share_memory_()

    def attach(self, model, rank):
        """Make the model's parameters and gradients views of the shared vectors."""
        at = 0
        for p in model.parameters():
            span = slice(at, at + p.numel())
            p.data = self.params[span].view(p.shape)
            p.grad = self.grads[rank, span].view(p.shape)
            at += p.numel()
        for layer, bias in zip(model.moe(), self.bias):
            layer.gate.e_score_correction_bias = bias
            layer.quantise = True


def decayed(model):
    """1 where weight decay applies (matrices), 0 elsewhere."""
    return torch.cat([
        torch.full((p.numel(),), float(p.dim() >= 2 and p.shape[0] > 1 and p.shape[1] > 1))
        for p in model.parameters()
    ])


def adamw(shared, span, decay, rate, step, scale):
    b1, b2 = BETAS
    g = shared.grads[:, span].sum(0).mul_(scale)
    p, m, v = shared.params[span], shared.m[span], shared.v[span]
    m.mul_(b1).add_(g, alpha=1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)
    denominator = (v / (1 - b2**step)).sqrt_().add_(ADAM_EPS)
    p.sub_(p * decay, alpha=rate * WEIGHT_DECAY)
    p.addcdiv_(m, denominator, value=-rate / (1 - b1**step))


def fraction_done(args, clock):
    return clock[1].item() / 60 / args.minutes if args.minutes else clock[0].item() / args.steps


def save(shared, args):
    state = {k: getattr(shared, k) for k in ("params", "m", "v", "bias", "clock")}
    path = os.path.join(args.work, "state.pt")
    torch.save(state, path + ".part")
    os.replace(path + ".part", path)


def worker(rank, args, shared, barrier):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    ranks = tokenizer.read(args.work)
    tok = tokenizer.Tokenizer(ranks)
    model = K3(checkpoint.text_config(len(ranks), **SIZE))
    shared.attach(model, rank)
    total = shared.params.numel()
    span = slice(total * rank // args.workers, total * (rank + 1) // args.workers)
    decay = decayed(model)[span]
    clock, saved = shared.clock, time.time()
    log = open(os.path.join(args.work, "log.jsonl"), "a") if rank == 0 else None
    while True:
        barrier.wait()
        if clock[3]:
            break
        began = time.time()
        step, done = int(clock[0]) + 1, float(clock[2])
        rng = random.Random("%d/%d/%d" % (args.seed, step, rank))
        ids, wanted = batch(tok, rng, done)
        shared.grads[rank].zero_()
        said = wanted != IGNORED
        loss = F.cross_entropy(model(ids, where=said), wanted[said])
        loss.backward()
        shared.loss[rank] = loss.detach()
        for i, layer in enumerate(model.moe()):
            shared.load[rank, i] = layer.load
        barrier.wait()
        mean = shared.grads[:, span].sum(0).div_(args.workers)
        shared.squares[rank] = mean.pow(2).sum()
        barrier.wait()
        norm = shared.squares.sum().sqrt().item()
        rate = LEARNING_RATE * min(1.0, step / WARMUP) * (FLOOR + (1 - FLOOR) * (1 - done))
        scale = min(1.0, CLIP / (norm + 1e-9)) / args.workers
        if math.isfinite(norm):
            adamw(shared, span, decay, rate, step, scale)
        if rank == 0:
            load = shared.load.sum(0).float()
            gap = load.mean(1, keepdim=True) - load
            shared.bias.add_(gap.sign(), alpha=BIAS_RATE * (1 - done))
            shared.bias.sub_(shared.bias.mean(1, keepdim=True))
            clock[0] = step
            clock[1] += time.time() - began
            clock[2] = fraction_done(args, clock)
            clock[3] = float(clock[2] >= 1)
            record = {
                "step": step, "seconds": round(clock[1].item(), 1), "rate": rate,
                "loss": shared.loss.mean().item(), "norm": norm,
                "load": (load.max(1).values / load.mean(1)).max().item(),
                "used": (load > 0).float().mean().item(),
            }
            log.write(json.dumps(record) + "\n")
            log.flush()
            if step % 20 == 0:
                print("step %(step)d, %(seconds).0f s: loss %(loss).3f, gradient %(norm).2f, "
                      "busiest expert %(load).1f x mean, in use %(used).3f" % record, flush=True)
        barrier.wait()
        if rank == 0 and (clock[3] or time.time() - saved > args.save_every):
            save(shared, args)
            saved = time.time()


def export(args, ranks):
    state = torch.load(os.path.join(args.work, "state.pt"))
    cfg = checkpoint.text_config(len(ranks), **SIZE)
    model = K3(cfg)
    shared = Shared(model, 1)
    shared.params.copy_(state["params"])
    shared.bias.copy_(state["bias"])
    shared.attach(model, 0)
    os.makedirs(args.out, exist_ok=True)
    checkpoint.write_model(model, args.out, 3)
    checkpoint.write_config(args.out, cfg, ranks)


def main():
    args = arguments()
    ranks = vocabulary(args)
    if not args.export_only:
        torch.manual_seed(args.seed)
        model = K3(checkpoint.text_config(len(ranks), **SIZE))
        shared = Shared(model, args.workers)
        shared.params.copy_(torch.cat([p.detach().flatten() for p in model.parameters()]))
        print("%d parameters" % shared.params.numel(), flush=True)
        path = os.path.join(args.work, "state.pt")
        if os.path.exists(path):
            for name, value in torch.load(path).items():
                getattr(shared, name).copy_(value)
            shared.clock[2] = fraction_done(args, shared.clock)  # the schedule may be longer now
            shared.clock[3] = float(shared.clock[2] >= 1)
        ctx = mp.get_context("spawn")
        barrier = ctx.Barrier(args.workers)
        mp.spawn(worker, (args, shared, barrier), nprocs=args.workers)
    if args.out:
        export(args, ranks)


if __name__ == "__main__":
    main()
