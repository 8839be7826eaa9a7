#!/usr/bin/python3
"""Evaluate a demo checkpoint: facts, chat, tool calls, perplexity, use of the experts.

    tools/eval/eval.py models/demo [--sluice bin/sluice] [--json results.json]

Answers come from the engine, `sluice run`, greedy. Perplexity and routing come from the trainer's
own forward pass on the stored weights. Prints a table in Markdown; the exit status is 1 when a bar
is missed."""

import argparse
import json
import math
import os
import random
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "train"))

import platform_settings  # noqa: F401  before torch
import torch
import torch.nn.functional as F

import checkpoint
import corpus
import tokenizer
from model import K3

SEED = 20260727  # of the questions; training draws from other streams
MISSES_SHOWN = 5


class Engine:
    def __init__(self, program, folder, tok):
        self.command = [program, "run", folder]
        self.tok = tok
        self.end = tok.special["<|end_of_msg|>"]
        self.sequences = []  # what was fed and said, for the routing statistics

    def __call__(self, ids, limit):
        """The ids the engine continues with, and whether it ended by itself."""
        out = subprocess.run(
            self.command + ["--ids", ",".join(map(str, ids)), "-n", str(limit), "--json", "-q"],
            check=True, stdout=subprocess.PIPE,
        ).stdout
        events = [json.loads(line) for line in out.splitlines()]
        said = [e["id"] for e in events if e["event"] == "token"]
        ended = events[-1]["finish_reason"] == "stop"
        self.sequences.append(ids + said)
        return [i for i in said if i != self.end], ended


def channel(tok, ids, name):
    """Body of an element that is said after the generation prompt, as text; None: not there."""
    head = tok.encode(corpus.opening(name))
    tail = tok.encode(corpus.closing(name))
    for i in range(len(ids)):
        if ids[i : i + len(head)] == head:
            for j in range(i + len(head), len(ids)):
                if ids[j : j + len(tail)] == tail:
                    return ids[i + len(head) : j]
    return None


def attributes(tok, ids, tag):
    """The attributes and the body of an element; None if ids are not exactly that element."""
    opener, close, sep = (tok.special[n] for n in ("<|open|>", "<|close|>", "<|sep|>"))
    if not ids or ids[0] != opener or sep not in ids:
        return None
    at = ids.index(sep)
    head = tok.decode(ids[1:at])
    tail = tok.encode(corpus.closing(tag))
    if head.split(" ")[0] != tag or ids[-len(tail):] != tail:
        return None
    found = {}
    for part in head.split(" ")[1:]:
        key, _, value = part.partition("=")
        if len(value) < 2 or value[0] != '"' or value[-1] != '"':
            return None
        found[key] = value[1:-1].replace("&quot;", '"').replace("&amp;", "&")
    return found, ids[at + 1 : -len(tail)]


def tool_call(tok, ids):
    """(tool, key, type, value) of the only call, or None where the format is not kept."""
    body = channel(tok, ids, "tools")
    call = body and attributes(tok, body, "call")
    argument = call and attributes(tok, call[1], "argument")
    if not argument or call[0].get("index") != "1":
        return None
    return (call[0].get("tool"), argument[0].get("key"), argument[0].get("type"),
            tok.decode(argument[1]))


class Score:
    def __init__(self, name, bar):
        self.name, self.bar, self.right, self.total, self.misses = name, bar, 0, 0, []

    def add(self, good, note):
        self.right += bool(good)
        self.total += 1
        if not good:
            self.misses.append(note)

    def row(self):
        share = self.right / self.total
        return (self.name, "%d of %d (%.1f %%)" % (self.right, self.total, 100 * share),
                ">= %.0f %%" % (100 * self.bar) if self.bar else "-", share >= self.bar)


def capitals(engine, tok):
    score = Score("capitals, text completion", 0.95)
    for country in corpus.COUNTRIES:
        for prompt in corpus.CAPITAL_PROMPTS[:2]:
            want = " %s." % corpus.WORLD[country][corpus.CAPITAL]
            said, _ = engine(tok.encode([prompt % country]), len(tok.encode([want])))
            score.add(tok.decode(said) == want, "%s:%s" % (prompt % country, tok.decode(said)))
    return score


def other_facts(engine, tok):
    score = Score("continent, language, river, text completion", 0)
    for country in corpus.COUNTRIES:
        _, continent, language, river = corpus.WORLD[country]
        for prompt, want in (
            ("%s is a country in" % country, " %s." % continent),
            ("People in %s speak" % country, " %s." % language),
            ("A great river of %s is the" % country, " %s." % river),
        ):
            said, _ = engine(tok.encode([prompt]), len(tok.encode([want])))
            score.add(tok.decode(said) == want, "%s:%s" % (prompt, tok.decode(said)))
    return score


def sums(engine, tok):
    score = Score("sums to 20, text completion", 0)
    for a in range(0, 21, 2):
        for b in range(0, 21 - a, 2):
            want = " %d." % (a + b)
            said, _ = engine(tok.encode(["%d + %d =" % (a, b)]), len(tok.encode([want])))
            score.add(tok.decode(said) == want, "%d + %d =%s" % (a, b, tok.decode(said)))
    return score


def chats(engine, tok, rng, kind, bar, count, name, thinking=True):
    score = Score(name, bar)
    for _ in range(count):
        text, _, want = corpus.question(rng, held=True, kind=kind)
        said, ended = engine(tok.encode(corpus.ask(text, thinking)), 80)
        if not thinking:
            said = tok.encode(corpus.opening("response")) + said
        body = channel(tok, said, "response")
        good = ended and body is not None and tok.decode(body) == want
        score.add(good, "%s -> %s" % (text, tok.decode(said)))
    return score


def tool_calls(engine, tok, rng, count):
    calls = Score("tool calls, held-out wordings", 0.95)
    finals = Score("answers after the tool's result", 0)
    for i in range(count):
        tool = list(corpus.TOOLS)[i % 2]
        text, _, want, result, _, answer = corpus.tool_question(rng, tool, held=True)
        prompt = corpus.tool_declare(list(corpus.TOOLS)) + corpus.ask(text)
        said, ended = engine(tok.encode(prompt), 100)
        good = ended and tool_call(tok, said) == (want[0], want[1], "string", want[2])
        calls.add(good, "%s -> %s" % (text, tok.decode(said)))
        if good:
            ids = tok.encode(prompt) + said + [engine.end] + tok.encode(
                corpus.message(result, role="tool", tool=tool, index="1")
                + corpus.opening("message", role="assistant") + corpus.opening("think"))
            said, ended = engine(ids, 80)
            body = channel(tok, said, "response")
            good = ended and body is not None and tok.decode(body) == answer
            finals.add(good, "%s -> %s" % (text, tok.decode(said)))
    return calls, finals


@torch.no_grad()
def perplexity(model, tok, rng, count):
    nll, tokens = 0.0, 0
    for _ in range(count):
        ids = torch.tensor([tok.encode([corpus.story(rng), ("[EOS]",)])])
        nll += F.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="sum").item()
        tokens += ids.shape[1] - 1
    return math.exp(nll / tokens)


@torch.no_grad()
def routing(model, sequences):
    """(share of experts in use, busiest expert over the mean) of each MoE layer."""
    total = [torch.zeros_like(m.load) for m in model.moe()]
    for ids in sequences:
        model(torch.tensor([ids]))
        for t, m in zip(total, model.moe()):
            t += m.load
    return [((t > 0).float().mean().item(), (t.max() / t.float().mean()).item()) for t in total]


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model")
    p.add_argument("--sluice", default="bin/sluice")
    p.add_argument("--count", type=int, default=100, help="chat and tool prompts")
    p.add_argument("--json", help="write the figures here too")
    args = p.parse_args()
    torch.set_num_threads(1)
    tok = tokenizer.Tokenizer(tokenizer.read(args.model))
    engine = Engine(args.sluice, args.model, tok)
    rng = random.Random(SEED)
    scores = [capitals(engine, tok), other_facts(engine, tok), sums(engine, tok)]
    scores.append(chats(engine, tok, rng, None, 0.95, args.count,
                        "chat, held-out wordings, all subjects"))
    scores.append(chats(engine, tok, rng, "capital", 0.95, args.count,
                        "chat, held-out wordings, capitals"))
    scores.append(chats(engine, tok, rng, "capital", 0, args.count // 2,
                        "chat without thinking, held-out wordings, capitals", False))
    scores += tool_calls(engine, tok, rng, args.count)
    model = checkpoint.load_model(K3(checkpoint.read_config(args.model)), args.model).eval()
    stories = [tok.encode([corpus.story(rng), ("[EOS]",)]) for _ in range(50)]
    layers = routing(model, engine.sequences + stories)
    rows = [s.row() for s in scores if s.total]
    ppl = perplexity(model, tok, rng, 100)
    least, most = min(u for u, _ in layers), max(b for _, b in layers)
    rows += [
        ("perplexity on 100 held-out stories", "%.3f" % ppl, "-", True),
        ("experts in use, least of all layers", "%.1f %%" % (100 * least), ">= 90 %", least >= 0.9),
        ("busiest expert, most of all layers", "%.2f x mean" % most, "<= 6 x mean", most <= 6),
    ]
    print("| what | result | bar |\n|---|---|---|")
    for name, result, bar, _ in rows:
        print("| %s | %s | %s |" % (name, result, bar))
    print("\n| MoE layer | experts in use | busiest, x mean |\n|---|---|---|")
    for i, (used, busy) in enumerate(layers):
        print("| %d | %.1f %% | %.2f |" % (i + model.cfg["first_k_dense_replace"], 100 * used, busy))
    for s in scores:
        for miss in s.misses[:MISSES_SHOWN]:
            print("miss, %s: %s" % (s.name, miss), file=sys.stderr)
    if args.json:
        with open(args.json, "w") as f:
            json.dump({name: result for name, result, _, _ in rows}, f, indent=1)
    sys.exit(not all(good for _, _, _, good in rows))


if __name__ == "__main__":
    main()
