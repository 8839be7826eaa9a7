"""Byte-level BPE as in the release: its pre-tokenisation pattern, ranks, and special ids after them."""

import base64
import heapq
import os
from collections import Counter, defaultdict

import regex

from checkpoint import SPECIAL

SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = regex.compile(
    "|".join((
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + "+" + SUFFIX,
        r"[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER + "*" + SUFFIX,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )),
    regex.V1,
)
# Ranks 0..255: the printable bytes, then the others.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = [bytes([b]) for b in PRINTABLE + [b for b in range(256) if b not in PRINTABLE]]


def train(texts, ranks):
    """The ranks (a list of bytes) that merging the most frequent pair, again and again, gives;
    ties go to the pair whose text is first in byte order."""
    pieces = Counter()
    for text in texts:
        pieces.update(PATTERN.findall(text))
    words = [([bytes([b]) for b in piece.encode()], n) for piece, n in sorted(pieces.items())]
    count, where = Counter(), defaultdict(set)
    for i, (parts, n) in enumerate(words):
        for pair in zip(parts, parts[1:]):
            count[pair] += n
            where[pair].add(i)
    heap = [(-n, pair) for pair, n in count.items()]
    heapq.heapify(heap)
    vocabulary, seen = list(BYTES), set(BYTES)
    while len(vocabulary) < ranks:
        if not heap:
            raise SystemExit("the corpus has only %d tokens" % len(vocabulary))
        negative, pair = heapq.heappop(heap)
        if -negative != count[pair] or not negative:
            continue
        merged = pair[0] + pair[1]
        if merged not in seen:
            vocabulary.append(merged)
            seen.add(merged)
        touched = set()
        for i in where.pop(pair):
            parts, n = words[i]
            for old in zip(parts, parts[1:]):
                count[old] -= n
                touched.add(old)
            out, j = [], 0
            while j < len(parts):
                if tuple(parts[j : j + 2]) == pair:
                    out.append(merged)
                    j += 2
                else:
                    out.append(parts[j])
                    j += 1
            words[i] = (out, n)
            for new in zip(out, out[1:]):
                count[new] += n
                where[new].add(i)
                touched.add(new)
        for changed in touched:
            if count[changed] > 0:
                heapq.heappush(heap, (-count[changed], changed))
    return vocabulary


def read(folder):
    with open(os.path.join(folder, "tiktoken.model"), "rb") as f:
        return [base64.b64decode(line.split()[0]) for line in f]


class Tokenizer:
    def __init__(self, ranks):
        self.tokens = ranks
        self.rank = {token: i for i, token in enumerate(ranks)}
        self.special = {name: len(ranks) + i for i, (name, _) in SPECIAL.items()}
        self.name = {i: name for name, i in self.special.items()}
        self.cache = {}

    def piece(self, text):
        """Ids of one piece of the pattern."""
        ids = self.cache.get(text)
        if ids is None:
            data = text.encode()
            if data in self.rank:
                ids = [self.rank[data]]
            else:
                parts = [bytes([b]) for b in data]
                while len(parts) > 1:
                    best = min(
                        range(len(parts) - 1),
                        key=lambda i: self.rank.get(parts[i] + parts[i + 1], len(self.rank)),
                    )
                    merged = parts[best] + parts[best + 1]
                    if merged not in self.rank:
                        break
                    parts[best : best + 2] = [merged]
                ids = [self.rank[p] for p in parts]
            self.cache[text] = ids
        return ids

    def encode(self, segments):
        """Ids of a list of segments, each tokenised on its own. A segment is a string, plain
        text, or a tuple of one special token's name."""
        ids = []
        for segment in segments:
            if isinstance(segment, tuple):
                ids.append(self.special[segment[0]])
            else:
                for piece in PATTERN.findall(segment):
                    ids += self.piece(piece)
        return ids

    def decode(self, ids):
        parts = []
        for i in ids:
            name = self.name.get(i, "<|reserved_token_%d|>" % i)
            parts.append(self.tokens[i] if i < len(self.tokens) else name.encode())
        return b"".join(parts).decode("utf-8", "replace")
