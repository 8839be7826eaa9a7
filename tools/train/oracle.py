#!/usr/bin/python3
"""Write the float64 logits and greedy continuations of a demo checkpoint: tests/data/demo.

    tools/train/oracle.py models/demo tests/data/demo [--sluice bin/sluice]

The forward pass is the trainer's, in float64 on the exact stored weights. A continuation is drafted
by the engine and checked here, all positions in one pass; from the first position where the draft
is not the float64 argmax it is drafted again. So every id is the trainer's own choice, at the cost
of one pass instead of one a token."""

import argparse
import json
import os
import subprocess

import platform_settings  # noqa: F401  before torch
import torch

import checkpoint
import corpus
import tokenizer
from model import K3

STEPS, PROMPTS = 200, 20
MIN_LEAD = 1e-3  # over the second logit; a prompt with a closer step is left out

TEXTS = (
    "The capital of France is", "The capital of Japan is", "The capital city of Peru is",
    "Paris is the capital of", "Kenya is a country in", "People in Brazil speak",
    "A great river of Egypt is the", "3 + 4 =", "Seven plus five is", "Count from 3 to 9:",
    "After Monday comes", "The month after June is", "One, two, three,",
    "Once there was a brave fox named Anna.", "The days of the week are",
    "The capital of Norway is", "The river of Hungary is the", "12 plus 6 is",
)
QUESTIONS = (
    "Could you tell me the capital of Spain?", "I want to know the capital city of Canada.",
    "Hello. What is 8 plus 9?", "Would you name the day after Sunday?",
)
CALLS = (
    ("get_weather", "Could you tell me the weather in Rome?"),
    ("calculator", "Could you calculate 47 * 38?"),
    ("get_weather", "Do you know the weather in Nairobi?"),
)


def prompts(tok):
    """(name, ids), chats and tools first so that all kinds are among those kept."""
    for tool, text in CALLS[:2]:
        yield text, tok.encode(corpus.tool_declare(list(corpus.TOOLS)) + corpus.ask(text))
    for text in QUESTIONS:
        yield text, tok.encode(corpus.ask(text))
    for text in TEXTS:
        yield text, tok.encode([text])
    for tool, text in CALLS[2:]:
        yield text, tok.encode(corpus.tool_declare([tool]) + corpus.ask(text))


def draft(args, ids, count):
    out = subprocess.run(
        [args.sluice, "run", args.model, "--ids", ",".join(map(str, ids)), "-n", str(count),
         "--ignore-eos", "--json", "-q"],
        check=True, stdout=subprocess.PIPE,
    ).stdout
    events = (json.loads(line) for line in out.splitlines())
    return [e["id"] for e in events if e["event"] == "token"]


def continuation(args, model, ids):
    """(logits after the prompt, greedy ids, smallest lead, disagreements with the drafts)."""
    said, wrong = [], 0
    while True:
        said = said + draft(args, ids + said, STEPS - len(said)) if len(said) < STEPS else said
        logits = model(torch.tensor([ids + said[:-1]]))[0, len(ids) - 1 :]
        best = logits.topk(2, -1)
        choice = best.indices[:, 0].tolist()
        if choice == said:
            return logits[0], said, (best.values[:, 0] - best.values[:, 1]).min().item(), wrong
        first = next(i for i in range(STEPS) if choice[i] != said[i])
        said, wrong = said[:first] + choice[first : first + 1], wrong + 1


@torch.no_grad()
def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model")
    p.add_argument("out")
    p.add_argument("--sluice", default="bin/sluice")
    args = p.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    tok = tokenizer.Tokenizer(tokenizer.read(args.model))
    model = checkpoint.load_model(K3(checkpoint.read_config(args.model)), args.model)
    kept, rows = [], []
    for name, ids in prompts(tok):
        if len(kept) == PROMPTS:
            break
        logits, said, lead, wrong = continuation(args, model, ids)
        print("%s: smallest lead %.2g, %d drafts corrected" % (name, lead, wrong), flush=True)
        if lead >= MIN_LEAD:
            kept.append({"prompt": name, "ids": ids, "min_lead": lead, "greedy": said})
            rows.append(logits.float())
    os.makedirs(args.out, exist_ok=True)
    with open(os.path.join(args.out, "logits.f32"), "wb") as f:
        f.write(torch.stack(rows).numpy().astype("<f4").tobytes())
    with open(os.path.join(args.out, "golden.json"), "w") as f:
        f.write('{"tolerance": 5e-4, "prompts": [\n')
        f.write(",\n".join(json.dumps(k, separators=(",", ":")) for k in kept))
        f.write("\n]}\n")
    print("%d prompts" % len(kept))


if __name__ == "__main__":
    main()
