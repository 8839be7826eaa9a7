#!/usr/bin/python3
"""Draw the loss of a training log as SVG: plot.py build/train/log.jsonl models/demo/loss.svg"""

import json
import math
import sys

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 360, 56, 20, 16, 44
SMOOTH = 0.95  # weight of the past in the running mean


def read(path):
    """step -> (seconds, loss); steps done again after an interruption count once."""
    points = {}
    with open(path) as f:
        for line in f:
            record = json.loads(line)
            points[record["step"]] = (record["seconds"], record["loss"])
    return sorted((step,) + rest for step, rest in points.items())


def draw(points):
    steps = points[-1][0]
    low = min(loss for _, _, loss in points) * 0.8
    high = max(loss for _, _, loss in points) * 1.1

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(loss):
        part = math.log(loss / low) / math.log(high / low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part

    def line(values, style):
        path = " ".join("%.1f,%.1f" % (x(s), y(v)) for s, v in values)
        return '<polyline fill="none" %s points="%s"/>' % (style, path)

    smooth, mean = [], None
    for step, _, loss in points:
        mean = loss if mean is None else SMOOTH * mean + (1 - SMOOTH) * loss
        smooth.append((step, mean))
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" '
        'font-size="12">' % (WIDTH, HEIGHT),
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for tick in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10):
        if low <= tick <= high:
            out.append('<path stroke="#ddd" d="M%d %.1fH%d"/><text x="%d" y="%.1f" '
                       'text-anchor="end">%g</text>'
                       % (LEFT, y(tick), WIDTH - RIGHT, LEFT - 6, y(tick) + 4, tick))
    each = 10 ** int(math.log10(steps))
    each = each // 5 if steps < 3 * each else each
    for tick in range(0, steps + 1, max(each, 1)):
        out.append('<text x="%.1f" y="%d" text-anchor="middle">%d</text>'
                   % (x(tick), HEIGHT - BOTTOM + 18, tick))
    out.append(line([(s, loss) for s, _, loss in points], 'stroke="#9bd"'))
    out.append(line(smooth, 'stroke="#036" stroke-width="2"'))
    out.append('<text x="%d" y="%d" text-anchor="middle">step (%.0f minutes)</text>'
               % ((LEFT + WIDTH) // 2, HEIGHT - 8, points[-1][1] / 60))
    out.append('<text x="12" y="%d" transform="rotate(-90 12 %d)" text-anchor="middle">'
               'loss, nats a token (log scale)</text></svg>' % (HEIGHT // 2, HEIGHT // 2))
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    with open(sys.argv[2], "w") as f:
        f.write(draw(read(sys.argv[1])))
