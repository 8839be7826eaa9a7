"""Compare the float64 forward pass with the golden checkpoints, which share no code with it.

Usage: validate.py [folder with golden.json ...]"""

import json
import os
import sys

import platform_settings  # noqa: F401  before torch
import torch

import checkpoint
from model import K3

torch.set_grad_enabled(False)


def worst_error(folder):
    torch.set_default_dtype(torch.float64)
    model = checkpoint.load_model(K3(checkpoint.read_config(folder)), folder)
    with open(os.path.join(folder, "golden.json")) as f:
        golden = json.load(f)
    worst = 0.0
    for prompt in golden["prompts"]:
        ids = torch.tensor([prompt["ids"]])
        want = torch.tensor(prompt["last_logits_f64"])
        worst = max(worst, (model(ids)[0, -1] - want).abs().max().item())
    return worst


if __name__ == "__main__":
    bad = False
    for folder in sys.argv[1:] or ("tests/data/golden/tiny-k3-a", "tests/data/golden/tiny-k3-b"):
        error = worst_error(folder)
        bad |= not error < 1e-9
        print("%s: largest error of a logit %.1e" % (folder, error))
    sys.exit(bad)
