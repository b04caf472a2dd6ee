"""HPACK (RFC 7541): header blocks read in full, and written in the plainest way there is.

Written: literals that no table of the peer's ever keeps, without Huffman coding. What would be worth keeping is a few
short constants; what must not be kept is the provider token and the device token; and Huffman coding in Python costs
more than all the rest of a push. So a change of the peer's table size is nothing to us.

Read: whatever a server may send, with the dynamic table (section 2.3.2) and Huffman coding (section 5.2).
"""

from collections import deque
from typing import Self

type Field = tuple[bytes, bytes]

TABLE_SIZE = 4096  # octets: what a decoder has to offer until its SETTINGS say otherwise, and ours never do
LARGEST_LIST = 64 * 1024  # octets, counted as in SETTINGS_MAX_HEADER_LIST_SIZE. APNs' have some hundred
_FIELD_OVERHEAD = 32  # section 4.1: what an entry counts beside its octets

# Appendix A, the indices 1 to 61.
STATIC: tuple[Field, ...] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
)

# Appendix B, by the length of each symbol's code, the 257th being EOS. The lengths say it all: codes of one length
# follow each other in the order of their symbols, and each length goes on where the shorter one ended.
# fmt: off
CODE_LENGTHS = (
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28,
    28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12,
    10, 13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6, 15, 5, 6,
    5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22,
    22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20,
    22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28,
    27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28,
    27, 27, 27, 27, 27, 26, 30,
)
# fmt: on
_EOS = 256


class HpackError(Exception):
    """A header block that makes no sense. What it did to the table is unknown, so the connection is lost with it."""


class _Node(dict[int, "tuple[bytes, _Node]"]):
    """A place in the tree of codes, and, for each octet that was ever read there, what it spells and where it leads.

    Filled as it is used: all of it would be 65,536 steps, and APNs' answers need some hundred.
    """

    __slots__ = ("bit", "padding", "root")

    def __init__(self, root: Self | None) -> None:
        super().__init__()
        self.root: _Node = self if root is None else root
        self.bit: list[_Node | int] = []
        self.padding = root is None  # whether a string may end here

    def __missing__(self, octet: int) -> "tuple[bytes, _Node]":
        node, symbols = self, bytearray()
        for shift in range(7, -1, -1):
            match node.bit[octet >> shift & 1]:
                case _Node() as node:
                    pass
                case symbol:
                    if symbol == _EOS:
                        raise HpackError("a Huffman-coded string holds EOS")  # section 5.2
                    symbols.append(symbol)
                    node = self.root
        self[octet] = step = bytes(symbols), node
        return step


def _tree() -> _Node:
    root = _Node(None)
    level = [root]
    for length in range(1, max(CODE_LENGTHS) + 1):
        symbols: list[_Node | int] = [s for s, its_length in enumerate(CODE_LENGTHS) if its_length == length]
        below: list[_Node | int] = [*symbols, *(_Node(root) for _ in range(2 * len(level) - len(symbols)))]
        for place, node in enumerate(level):
            node.bit = below[2 * place : 2 * place + 2]
        level = [node for node in below if isinstance(node, _Node)]
    # Section 5.2: the last octet is filled up with the beginning of EOS, all ones, and with less than 8 bits of it.
    node = root
    for _ in range(7):
        following = node.bit[1]
        assert isinstance(following, _Node)  # noqa: S101  EOS has 30 bits, and no code is a beginning of another
        node = following
        node.padding = True
    return root


_ROOT = _tree()


def huffman_decode(octets: bytes) -> bytes:
    node, spelt = _ROOT, []
    for octet in octets:
        symbols, node = node[octet]
        spelt.append(symbols)
    if not node.padding:
        raise HpackError("a Huffman-coded string ends within a code")
    return b"".join(spelt)


class Decoder:
    """Reads the header blocks of one connection, in the order in which they came."""

    def __init__(self) -> None:
        self._table: deque[Field] = deque()  # the newest first
        self._size = 0
        self._limit = TABLE_SIZE

    def decode(self, block: bytes) -> list[Field] | None:
        """Read one block. None if it spells more than `LARGEST_LIST`: a few octets can spell megabytes."""
        try:
            return self._decode(block)
        except IndexError:
            raise HpackError("a header block ends too early, or points beyond the tables") from None

    def _decode(self, block: bytes) -> list[Field] | None:
        fields: list[Field] = []
        at, end, size = 0, len(block), 0
        while at < end:
            octet = block[at]
            if octet >= 0x80:  # section 6.1: indexed
                index, at = _integer(block, at, 0x7F)
                field = self._field(index)
            elif octet & 0xE0 == 0x20:  # section 6.3: table size update, section 4.2: before any field
                limit, at = _integer(block, at, 0x1F)
                if limit > TABLE_SIZE or fields or size:
                    raise HpackError("a table size update that is too large, or too late")
                self._limit = limit
                self._evict()
                continue
            else:  # section 6.2: literal, with incremental indexing or without
                indexed = octet >= 0x40
                index, at = _integer(block, at, 0x3F if indexed else 0x0F)
                if index:
                    name = self._field(index)[0]
                else:
                    name, at = _string(block, at)
                value, at = _string(block, at)
                field = name, value
                if indexed:
                    self._table.appendleft(field)
                    self._size += len(name) + len(value) + _FIELD_OVERHEAD
                    if self._size > self._limit:
                        self._evict()
            size += len(field[0]) + len(field[1]) + _FIELD_OVERHEAD
            if size <= LARGEST_LIST:
                fields.append(field)
        return fields if size <= LARGEST_LIST else None

    def _field(self, index: int) -> Field:
        if not index:
            raise HpackError("index 0")
        return STATIC[index - 1] if index <= len(STATIC) else self._table[index - len(STATIC) - 1]

    def _evict(self) -> None:
        """Section 4.3 and 4.4. An entry larger than the whole table empties it, and is no error."""
        while self._size > self._limit:
            name, value = self._table.pop()
            self._size -= len(name) + len(value) + _FIELD_OVERHEAD


def _integer(block: bytes, at: int, largest: int) -> tuple[int, int]:
    """Section 5.1: an integer that begins in the low bits of an octet, and where it ends."""
    number = block[at] & largest
    at += 1
    if number < largest:
        return number, at
    for shift in (0, 7, 14, 21):  # 28 bits are more than any length or index here can be
        octet = block[at]
        at += 1
        number += (octet & 0x7F) << shift
        if octet < 0x80:
            return number, at
    raise HpackError("an integer that is too long")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """Section 5.2."""
    huffman = block[at] >= 0x80
    length, at = _integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise HpackError("a string that is longer than its block")
    octets = block[at:end]
    return huffman_decode(octets) if huffman else octets, end


def _encode_integer(number: int, largest: int, flags: int) -> bytes:
    if number < largest:
        return bytes((flags | number,))
    octets = bytearray((flags | largest,))
    number -= largest
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    octets.append(number)
    return bytes(octets)


# The lengths of values, ready to be joined in. A provider token has some 200 octets.
_LENGTHS = tuple(_encode_integer(length, 0x7F, 0) for length in range(512))


def length_of(octets: bytes) -> bytes:
    """Encode the length that stands before the octets of a string (section 5.2)."""
    length = len(octets)
    return _LENGTHS[length] if length < 512 else _encode_integer(length, 0x7F, 0)


_NAMES = {name: index for index, (name, _) in reversed(tuple(enumerate(STATIC, 1)))}

# Section 6.2.3: no intermediary may index it, nor learn it from sizes.
_NEVER_INDEXED = frozenset({b"authorization", b"proxy-authorization", b"cookie"})


def literal_name(name: bytes) -> bytes:
    """Begin a literal field that is not to be indexed (sections 6.2.2 and 6.2.3). Its value follows."""
    flags = 0x10 if name in _NEVER_INDEXED else 0x00
    if index := _NAMES.get(name):
        return _encode_integer(index, 0x0F, flags)
    return bytes((flags,)) + length_of(name) + name


METHOD_POST, SCHEME_HTTPS = b"\x83", b"\x87"  # the indices 3 and 7 of the static table
NO_TABLE = (
    b"\x20"  # table size update: 0. Said in the first block, it makes every later limit of the peer's large enough
)
