"""A seed is a split on every platform: the splits of an independent reimplementation in whole numbers.

What follows is written from the publications (Fisher and Yates, Marsaglia's normal and gamma draws), in Python's
integers and 40-digit decimals, of the words of NumPy's PCG64: it knows no floating point, so it gives the same on every
machine. The package must agree with it example by example.
"""

from __future__ import annotations

import decimal
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pytest
from data_files import places, source_of

from jaxpfl.data import federate
from jaxpfl.data.federate import SplitPurpose, split_rng

M32 = 2**32 - 1
CONTEXT = decimal.Context(prec=40)


class Words:
    """The words of NumPy's generator, which are whole numbers, for a named part of a split."""

    def __init__(self, split_seed: int, *names: int) -> None:
        self.next64, self.half = split_rng(split_seed, *names).bit_generator.random_raw, None

    def next32(self) -> int:
        if self.half is not None:
            value, self.half = self.half, None
            return value
        value = self.next64()
        self.half = value >> 32
        return value & M32

    def up_to(self, largest: int) -> int:
        """An integer in 0 .. largest: as many bits as it has, until they are not too large."""
        mask = 2 ** largest.bit_length() - 1
        while (value := self.next32() & mask) > largest:
            pass
        return value

    def permuted(self, items: list[int]) -> list[int]:
        items = list(items)
        for i in range(len(items) - 1, 0, -1):
            j = self.up_to(i)
            items[i], items[j] = items[j], items[i]
        return items

    def uniform(self, n: int) -> list[Decimal]:
        return [(Decimal(self.next64() >> 12) + Decimal("0.5")) / 2**52 for _ in range(n)]

    def normal(self, n: int) -> list[Decimal]:
        found: list[Decimal] = []
        while len(found) < n:
            count = n - len(found)
            u = [2 * value - 1 for value in self.uniform(count + count % 2)]
            pairs = list(zip(u[: len(u) // 2], u[len(u) // 2 :], strict=True))
            pairs = [(a, b, a * a + b * b) for a, b in pairs]
            factors = [(a, b, (-2 * s.ln() / s).sqrt()) for a, b, s in pairs if 0 < s < 1]
            found += [a * f for a, _, f in factors] + [b * f for _, b, f in factors]
        return found[:n]

    def log_gamma(self, shape: Decimal, n: int) -> list[Decimal]:
        d = (shape if shape >= 1 else shape + 1) - Decimal(1) / 3
        c = 1 / (9 * d).sqrt()
        found: list[Decimal] = []
        while len(found) < n:
            count = n - len(found)
            x, u = self.normal(count), self.uniform(count)
            for x_i, u_i in zip(x, u, strict=True):
                v = (1 + c * x_i) ** 3
                if v > 0 and u_i.ln() < x_i * x_i / 2 + d - d * v + d * v.ln():
                    found.append(v.ln() + d.ln())
        if shape >= 1:
            return found[:n]
        return [value + u.ln() / shape for value, u in zip(found[:n], self.uniform(n), strict=True)]


def dealt(rng: Words, labels: list[int], classes: list[int], counts: list[list[int]]) -> list[list[int]]:
    """Each client's examples, class by class, by a table of counts."""
    parts: list[list[int]] = [[] for _ in counts]
    for place, label in enumerate(classes):
        rest = rng.permuted([i for i, own in enumerate(labels) if own == label])
        for part, row in zip(parts, counts, strict=True):
            part += rest[: row[place]]
            rest = rest[row[place] :]
    return parts


def cut(items: list[int], pieces: int) -> list[list[int]]:
    """Nearly equal consecutive pieces, the longer ones first."""
    size, more = divmod(len(items), pieces)
    ends: Iterator[int] = iter(np.cumsum([0] + [size + (i < more) for i in range(pieces)]).tolist())
    start = next(ends)
    return [items[start : (start := end)] for end in ends]


def iid(rng: Words, labels: list[int], m: int) -> list[list[int]]:
    return cut(rng.permuted(list(range(len(labels)))), m)


def shards(rng: Words, labels: list[int], m: int) -> list[list[int]]:
    order = sorted(rng.permuted(list(range(len(labels)))), key=lambda i: labels[i])
    pieces, hands = cut(order, 2 * m), rng.permuted(list(range(2 * m)))
    return [pieces[hands[2 * i]] + pieces[hands[2 * i + 1]] for i in range(m)]


def dirichlet(rng: Words, labels: list[int], m: int) -> list[list[int]]:
    classes, n = sorted(set(labels)), len(labels)
    draws = rng.log_gamma(Decimal("0.5"), m * len(classes))
    weights = [[draw.exp() for draw in draws[i * len(classes) : (i + 1) * len(classes)]] for i in range(m)]
    longer = set(rng.permuted(list(range(m)))[: n % m])
    turns = rng.permuted([i for i in range(m) for _ in range(n // m + (i in longer))])
    left = {label: labels.count(label) for label in classes}
    counts = [[0] * len(classes) for _ in range(m)]
    for client, u in zip(turns, rng.uniform(n), strict=True):
        alive = [place for place, label in enumerate(classes) if left[label]]
        aim = u * sum(weights[client][place] for place in alive)
        for chosen in alive:
            aim -= weights[client][chosen]
            if aim < 0:
                break
        counts[client][chosen] += 1
        left[classes[chosen]] -= 1
    return dealt(rng, labels, classes, counts)


def dirichlet_class(rng: Words, labels: list[int], m: int) -> list[list[int]]:
    classes, n = sorted(set(labels)), len(labels)
    while True:
        counts = [[0] * len(classes) for _ in range(m)]
        for place in rng.permuted(list(range(len(classes)))):
            weights = [draw.exp() for draw in rng.log_gamma(Decimal("0.5"), m)]
            open_ = [i for i in range(m) if sum(counts[i]) * m < n]
            total, whole = labels.count(classes[place]), sum(weights[i] for i in open_)
            before, run = 0, Decimal(0)
            for i in open_:
                run += weights[i]
                end = total if i == open_[-1] else int(run / whole * total)
                counts[i][place], before = end - before, end
        if min(map(sum, counts)) >= 10:
            return dealt(rng, labels, classes, counts)


def lognormal(rng: Words, labels: list[int], m: int) -> list[list[int]]:
    z = rng.normal(m)
    weights = [int((value - max(z)).exp() * 2**36) for value in z]
    sizes = [weight * len(labels) // sum(weights) for weight in weights]
    rests = [weight * len(labels) % sum(weights) for weight in weights]
    for i in sorted(rng.permuted(list(range(m))), key=lambda i: -rests[i])[: len(labels) - sum(sizes)]:
        sizes[i] += 1
    order = rng.permuted(list(range(len(labels))))
    ends = np.cumsum([0, *sizes]).tolist()
    return [order[start:end] for start, end in pairwise(ends)]


def clusters(rng: Words, labels: list[int], m: int) -> list[list[int]]:
    named(rng, labels, m)
    return iid(rng, labels, m)


def named(rng: Words, labels: list[int], m: int) -> list[list[int]]:
    """Each client's numbers of the classes, three clusters."""
    member, classes = rng.permuted([i % 3 for i in range(m)]), sorted(set(labels))
    known: list[list[int]] = []
    while len(known) < 3:
        drawn = rng.permuted(classes)
        known += [drawn] if drawn not in known else []
    return [known[c] for c in member]


RULES = {
    "iid": (iid, {}),
    "shards": (shards, {}),
    "dirichlet": (dirichlet, {"alpha": 0.5}),
    "dirichlet-class": (dirichlet_class, {"alpha": 0.5}),
    "lognormal": (lognormal, {"sigma": 1.0}),
    "clusters": (clusters, {"clusters": 3}),
}


@pytest.mark.parametrize("seed", [0, 11])
@pytest.mark.parametrize("name", RULES)
def test_the_split_is_that_of_whole_numbers(name: str, seed: int) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(4), [150, 100, 97, 53]))
    rule, options = RULES[name]
    federation = federate(source_of(labels), partition=name, clients=8, test_share=0.0, split_seed=seed, **options)
    with decimal.localcontext(CONTEXT):
        expected = rule(Words(seed, SplitPurpose.PARTITION), labels.tolist(), 8)
    for held, own in zip(places(federation, "train"), expected, strict=True):
        assert held.tolist() == own
    if name == "clusters":
        numbers = named(Words(seed, SplitPurpose.PARTITION), labels.tolist(), 8)
        for y, mask, own, names in zip(federation.train.y, federation.train.mask, expected, numbers, strict=True):
            assert y[mask].tolist() == [names[labels[place]] for place in own]
