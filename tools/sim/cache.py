#!/usr/bin/env python3
"""Replays records of routing against cache policies for routed experts, and prints how many are found resident.

    tools/sim/cache.py [--csv FILE] [--trace FILE.jsonl ...] [--recorded k3-routing-trace.bin] ...

--trace takes what `sluice run --trace` writes. --recorded takes little-endian int32 pairs (layer, expert) in the order
of requests, each layer's together, as recorded on the released Kimi K3: a run that computes its whole prefix anew
at every step, so it is split into sweeps over the layers and these into positions. A position's routing is the same in
every sweep that has it, which is checked, so the last sweep holds all there is: one pass a position is what decoding
it looks like. `--prompt N` takes the first N positions as one pass, a prompt, and does not count them.

A cache holds a number of slots. Experts that a pass needs are read into other slots first, as the engine does, so a
pass never evicts what it uses; afterwards the policy says what stays. A hit is an expert that was resident when its
layer's batch began.
Policies of a layer's own share of the slots, or of one list over all layers:
    lru          the most recently used stay, ties to the lower index
    lru-times    the same, ties to those that more tokens have called for so far: the engine's
    lfu          those called for most often, ties to the more recent
    decay-H      frequency in which a call counts half after H passes (1: nearly lru, infinite: lfu)
    mix-H        lru, ties to the frequency that decays like this
    belady       the furthest next use leaves: no policy can do better
Absent data is skipped, and said so. Standard library only."""
import argparse
import collections
import csv
import json
import math
import os
import struct
import sys

GB = 1e9
DECAYS = (1, 2, 4, 16, 64)
# Kimi K3, in bytes. fixed: what the planner sets aside beside the trunk (index, state, scratch, ring, slots in flight).
K3 = {"layers": 92, "experts": 896, "top_k": 16, "slot": 17547264, "trunk": 111160688000, "packed": 0.70,
      "fixed": 1.9e9}


class Trace:
    """passes: lists of (layer, {expert: tokens}) in order of computation; `skip` passes at first are not counted."""

    def __init__(self, name, passes, experts, skip=0):
        self.name, self.passes, self.experts, self.skip = name, passes, experts, skip
        self.layers = sorted({layer for one in passes for layer, _ in one})


def sweeps_of_recording(path):
    """[sweep][layer] -> [position] -> experts."""
    raw = open(path, "rb").read()
    pairs = list(struct.iter_unpack("<ii", raw))
    sweeps, last = [], None
    for layer, expert in pairs:
        if last is None or layer < last:
            sweeps.append(collections.OrderedDict())
        sweeps[-1].setdefault(layer, []).append(expert)
        last = layer
    k = K3["top_k"]
    return [{layer: [e[i:i + k] for i in range(0, len(e), k)] for layer, e in sweep.items()} for sweep in sweeps]


def load_recording(path, prompt, sweeps_too):
    sweeps = sweeps_of_recording(path)
    for a, b in zip(sweeps, sweeps[1:]):
        for layer in a:
            if any(set(x) != set(y) for x, y in zip(a[layer], b[layer])):
                sys.exit(f"{path}: layer {layer}: a sweep does not repeat the one before it: not one growing prefix")
    last = sweeps[-1]
    n = len(next(iter(last.values())))
    groups = [range(0, prompt)] * (prompt > 0) + [range(p, p + 1) for p in range(prompt, n)]
    passes = [[(layer, collections.Counter(e for p in g for e in last[layer][p])) for layer in sorted(last)]
              for g in groups]
    naive = [[(layer, collections.Counter(e for one in s[layer] for e in one)) for layer in sorted(s)] for s in sweeps]
    decode = Trace("k3-decode", passes, K3["experts"], skip=1 if prompt else 0)
    return [decode] + [Trace("k3-sweeps", naive, K3["experts"])] * sweeps_too


def load_trace(path, prompt):
    passes, top = collections.OrderedDict(), 0
    with open(path, encoding="utf-8") as f:
        head = json.loads(f.readline())
        if head.get("format") != "sluice-routing-trace" or head.get("version") != 1:
            sys.exit(f"{path}: format: found {head}, expected sluice-routing-trace, version 1")
        for line in f:
            r = json.loads(line)
            layers = passes.setdefault(r["pass"], collections.OrderedDict())
            layers.setdefault(r["layer"], collections.Counter()).update(r["experts"])
            top = max(top, *r["experts"])
    return Trace(os.path.basename(path), [list(layers.items()) for layers in passes.values()], top + 1, skip=prompt)


def next_uses(trace):
    """[(pass, layer, expert)] -> number of the pass that uses it next, or infinity."""
    later, out = {}, {}
    for p in range(len(trace.passes) - 1, -1, -1):
        for layer, calls in trace.passes[p]:
            for e in calls:
                out[p, layer, e] = later.get((layer, e), float("inf"))
                later[layer, e] = p
    return out


def replay(trace, policy, slots, shared, future):
    """(calls, hits) counted. Keys sort ascending by worth: the least leaves."""
    held, seen, calls_n, hits_n = collections.defaultdict(dict), {}, 0, 0
    order = {layer: i for i, layer in enumerate(trace.layers)}
    n_layers = len(trace.layers)

    def quota(layer):
        return slots if shared else slots // n_layers + (order[layer] < slots % n_layers)

    half = float(policy.split("-")[1]) if policy.startswith(("decay-", "mix-")) else None
    for p, one in enumerate(trace.passes):
        for layer, calls in one:
            box = held[None if shared else layer]
            now = p * n_layers + order[layer]
            if p >= trace.skip:
                calls_n += len(calls)
                hits_n += sum((layer, e) in box for e in calls)
            for e in sorted(calls):
                times, score, used = seen.get((layer, e), (0, 0.0, 0))
                times += calls[e]
                if half:
                    score = score * 0.5 ** ((p - used) / half) + calls[e]
                seen[layer, e] = (times, score, p)
                if policy == "lru":
                    key = (now, -e)
                elif policy == "lru-times":
                    key = (now, times, e)  # exactly as src/store/expert.c
                elif policy == "lfu":
                    key = (times, now, -e)
                elif policy == "belady":
                    n = future[p, layer, e]
                    key = (-(n * n_layers + order[layer]), -e)
                elif policy.startswith("mix-"):
                    key = (now, score, -e)
                else:  # decayed: log2 of the score, brought to a common time, keeps the order for ever
                    key = (math.log2(score) + p / half, now, times, -e)
                box[layer, e] = key
            room = quota(layer)
            if len(box) > room:
                for gone in sorted(box, key=box.get)[:len(box) - room]:
                    del box[gone]
    return calls_n, hits_n


def sizes(args, trace):
    """(label, GB, slots): by plain GB of cache, then by RAM with the trunk resident first, raw and packed."""
    if trace.name.startswith("k3-"):
        for gb in args.gb:
            yield "cache", gb, int(gb * GB // K3["slot"])
        for share, label in ((1.0, "ram"), (K3["packed"], "ram-packed")):
            for gb in args.gb:
                left = gb * GB - K3["fixed"] - K3["trunk"] * share
                if left > 0:
                    yield label, gb, int(left // K3["slot"])
    else:
        every = len(trace.layers) * trace.experts
        for percent in (2, 5, 10, 20, 30, 50, 75):
            yield "share-%", percent, max(1, every * percent // 100)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--recorded", action="append", default=[])
    a.add_argument("--trace", action="append", default=[])
    a.add_argument("--prompt", type=int, default=5,
                   help="positions (recorded) or passes (trace) at first that are not counted")
    a.add_argument("--gb", type=lambda s: [float(x) for x in s.split(",")],
                   default=[8, 12, 16, 20, 24, 36, 48, 64, 96, 109, 128, 192])
    a.add_argument("--sweeps", action="store_true", help="replay the recorded sweeps as they are too")
    a.add_argument("--slots", type=int, help="print `slots policy calls hits` for this number of slots alone")
    a.add_argument("--csv")
    args = a.parse_args()
    traces = []
    for load, paths in ((lambda p, n: load_recording(p, n, args.sweeps), args.recorded),
                        (lambda p, n: [load_trace(p, n)], args.trace)):
        for path in paths:
            if os.path.exists(path):
                traces += load(path, args.prompt)
            else:
                print(f"skipped: {path} is not there", file=sys.stderr)
    names = [("global", "lru"), ("layer", "lru"), ("layer", "lru-times"), ("layer", "lfu")]
    names += [("layer", f"decay-{h}") for h in DECAYS] + [("layer", "mix-8")]
    names += [("layer", "belady"), ("global", "belady")]
    rows = []
    for t in traces:
        future = next_uses(t)
        if args.slots:
            for scope, name in names:
                print(args.slots, f"{scope}:{name}", *replay(t, name, args.slots, scope == "global", future))
            continue
        calls, _ = replay(t, "lru", 1, False, future)
        first = set((layer, e) for one in t.passes[:t.skip] for layer, c in one for e in c)
        fresh = 0
        for one in t.passes[t.skip:]:
            for layer, c in one:
                fresh += sum((layer, e) not in first for e in c)
                first.update((layer, e) for e in c)
        seen = 100 * (1 - fresh / max(calls, 1))
        print(f"{t.name}: {len(t.passes) - t.skip} passes counted, {calls} calls, {seen:.1f} % seen before; hits in %")
        print(f"{'':10} {'':>6} {'slots':>6} " + " ".join(f"{s[0]}:{n[:9]:<9}" for s, n in names))
        for label, gb, slots in sizes(args, t):
            out = []
            for scope, name in names:
                n, hits = replay(t, name, slots, scope == "global", future)
                out.append(100 * hits / max(n, 1))
                rows.append([t.name, label, gb, slots, round(slots / len(t.layers), 2), scope, name, n, hits,
                             round(out[-1], 2)])
            print(f"{label:10} {gb:6g} {slots:6} " + " ".join(f"{x:11.1f}" for x in out))
    if args.csv and rows:
        with open(args.csv + ".tmp", "w", newline="", encoding="utf-8") as f:
            w = csv.writer(f, lineterminator="\n")
            w.writerow(["trace", "size", "amount", "slots", "slots_per_layer", "scope", "policy", "calls", "hits",
                        "hit_percent"])
            w.writerows(rows)
        os.replace(args.csv + ".tmp", args.csv)
    return 0 if traces else 77


if __name__ == "__main__":
    sys.exit(main())
