"""Writers and readers of the messages whose lengths the compressors count: uint8 arrays of zeros and ones."""

import numpy as np

FLOAT = 32


def fixed(numbers: np.ndarray, width: int) -> np.ndarray:
    """Integers [n] in [0, 2^width) -> [n * width] bits, the highest first."""
    shifts = np.arange(width - 1, -1, -1)
    return ((np.asarray(numbers, np.int64)[:, None] >> shifts) & 1).astype(np.uint8).reshape(-1)


def floats(numbers: np.ndarray) -> np.ndarray:
    """Single-precision numbers [n] -> [32 n] bits, exact for every number (minus zero, NaN)."""
    return fixed(np.ascontiguousarray(numbers, np.float32).view(np.uint32), FLOAT)


class Reader:
    """Reader of a bit string, from left to right."""

    def __init__(self, bits: np.ndarray):
        self.bits = np.asarray(bits, np.uint8)
        self.at = 0

    def take(self, number: int) -> np.ndarray:
        end = self.at + number
        assert end <= len(self.bits), "the message is cut short"
        self.at, start = end, self.at
        return self.bits[start:end]

    def end(self) -> None:
        assert self.at == len(self.bits), "bits remain"

    def fixed(self, number: int, width: int) -> np.ndarray:
        weights = 1 << np.arange(width - 1, -1, -1, dtype=np.int64)
        return self.take(number * width).reshape(number, width).astype(np.int64) @ weights

    def floats(self, number: int) -> np.ndarray:
        return self.fixed(number, FLOAT).astype(np.uint32).view(np.float32)

    def elias(self, number: int) -> np.ndarray:
        return np.array([self._elias() for _ in range(number)], np.int64)

    def _elias(self) -> int:
        zeros = 0
        while not self.take(1)[0]:
            zeros += 1
        return int((1 << zeros) + self.fixed(1, zeros)[0])

    def positions(self) -> np.ndarray:
        number = self._elias() - 1
        return np.cumsum(self.elias(number)) - 1


def encode_elias(numbers: np.ndarray) -> np.ndarray:
    """Elias gamma codes of positive integers [n], concatenated."""
    numbers = np.asarray(numbers, np.int64)
    zeros = np.frexp(numbers.astype(np.float64))[1] - 1
    ends = np.cumsum(2 * zeros + 1)
    bits = np.zeros(ends[-1] if len(ends) else 0, np.uint8)
    for place in range(int(zeros.max(initial=-1)) + 1):
        has = zeros >= place
        bits[ends[has] - 1 - place] = (numbers[has] >> place) & 1
    return bits


def encode_positions(places: np.ndarray) -> np.ndarray:
    """Increasing positions [n], from 0."""
    return encode_elias(np.concatenate([[len(places) + 1], np.diff(places, prepend=-1)]))


def encode_runs(x: np.ndarray) -> np.ndarray:
    """The run-length message of [d] float32, d >= 1."""
    pattern = np.ascontiguousarray(x, np.float32).view(np.uint32)
    starts = np.flatnonzero(np.diff(pattern.astype(np.int64), prepend=-1))
    lengths = encode_elias(np.diff(starts, append=len(pattern)))
    known, place = np.unique(pattern[starts], return_inverse=True)
    width = (len(known) - 1).bit_length()
    plain = floats(pattern[starts].view(np.float32))
    table = np.concatenate([encode_elias(np.array([len(known)])), floats(known.view(np.float32)), fixed(place, width)])
    tabled = len(table) < len(plain)
    return np.concatenate([np.array([tabled], np.uint8), lengths, table if tabled else plain])


def decode_runs(bits: np.ndarray, d: int) -> np.ndarray:
    """The vector [d] float32 of a run-length message."""
    reader = Reader(bits)
    tabled = bool(reader.take(1)[0])
    lengths, filled = [], 0
    while filled < d:
        lengths.append(int(reader.elias(1)[0]))
        filled += lengths[-1]
    if tabled:
        distinct = int(reader.elias(1)[0])
        known = reader.floats(distinct)
        numbers = known[reader.fixed(len(lengths), (distinct - 1).bit_length())]
    else:
        numbers = reader.floats(len(lengths))
    reader.end()
    return np.repeat(numbers, lengths)


def encode_qsgd(norm: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The message of a norm and signed levels [d]."""
    levels = np.asarray(levels, np.int64)
    places = np.flatnonzero(levels)
    sent = levels[places]
    signs = fixed(sent < 0, 1)
    return np.concatenate([floats(np.reshape(norm, 1)), encode_positions(places), signs, encode_elias(np.abs(sent))])


def decode_qsgd(bits: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
    """The norm [] float32 and the signed levels [d] int32."""
    reader = Reader(bits)
    norm = reader.floats(1)[0]
    places = reader.positions()
    signs = 1 - 2 * reader.fixed(len(places), 1)
    levels = np.zeros(d, np.int32)
    levels[places] = signs * reader.elias(len(places))
    reader.end()
    return norm, levels


def encode_top_k(value: np.ndarray) -> np.ndarray:
    """The message of a sparse vector [d] float32."""
    places = np.flatnonzero(value)
    return np.concatenate([encode_positions(places), floats(value[places])])


def decode_top_k(bits: np.ndarray, d: int) -> np.ndarray:
    """The vector [d] float32, with zeros for minus zeros."""
    reader = Reader(bits)
    places = reader.positions()
    value = np.zeros(d, np.float32)
    value[places] = reader.floats(len(places))
    reader.end()
    return value
