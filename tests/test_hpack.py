"""The proven `hpack` is the referee: it writes what we read, and reads what we write."""

import hpack
import hypothesis.strategies as st
import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.table import HeaderTable
from hypothesis import example, given

from core.hpack import (
    CODE_LENGTHS,
    LARGEST_LIST,
    NO_TABLE,
    STATIC,
    TABLE_SIZE,
    Decoder,
    HpackError,
    huffman_decode,
    length_of,
    literal_name,
)

_names = st.sampled_from([b":status", b"apns-id", b"date", b"x"]) | st.binary(min_size=1, max_size=30)
_fields = st.tuples(_names, st.binary(max_size=200) | st.sampled_from([b"200", b"410", b"nginx"]), st.booleans())


def test_the_tables_are_those_of_the_rfc() -> None:
    assert tuple(REQUEST_CODES_LENGTH) == CODE_LENGTHS
    assert HeaderTable.STATIC_TABLE == STATIC


@given(
    blocks=st.lists(
        st.tuples(st.lists(_fields, max_size=8), st.booleans(), st.none() | st.integers(0, TABLE_SIZE)), max_size=8
    )
)
def test_what_another_encoder_wrote_is_read_as_it_was_meant(
    blocks: list[tuple[list[tuple[bytes, bytes, bool]], bool, int | None]],
) -> None:
    encoder, decoder = hpack.Encoder(), Decoder()
    for fields, huffman, table_size in blocks:
        if table_size is not None:
            encoder.header_table_size = table_size
        block = encoder.encode(fields, huffman=huffman)
        assert decoder.decode(block) == [(name, value) for name, value, _ in fields]


_octet_of_a_block = st.integers(0, 255) | st.sampled_from([0x82, 0x88, 0xBE, 0xBF, 0x40, 0x00, 0x01, 0x20, 0x3F, 0x81])


@given(blocks=st.lists(st.lists(_octet_of_a_block, max_size=40).map(bytes), max_size=4))
@example([b"\x40\x01a\x01b", b"\xbe"])
@example([b"\x3f\xe1\x1f", b"\x3f\xe1\x5f"])
@example([b"\x3f\xff\xff\xff\xff\xff\x01"])
@example([b"\x00\x81\xff\x00"])
@example([b"\x00\x81\x0f\x00"])
def test_garbage_is_refused_or_read_as_another_decoder_reads_it(blocks: list[bytes]) -> None:
    ours, theirs = Decoder(), hpack.Decoder()
    theirs.max_allowed_table_size = TABLE_SIZE
    for block in blocks:
        try:
            fields = ours.decode(block)
        except HpackError:
            return
        assert fields == [tuple(field) for field in theirs.decode(block, raw=True)]


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (b"\x80", "index 0"),
        (b"\xbe", "points beyond"),
        (b"\x40\x01a", "ends too early"),
        (b"\x00\x05abcd", "longer than its block"),
        (b"\x00\x01a\xff\xff\xff\xff\xff\x0f", "too long"),
        (b"\x3f\xe2\x1f", "too large"),
        (b"\x88\x20", "too late"),
        (b"\x00\x84\xff\xff\xff\xff\x00", "EOS"),
        (b"\x00\x81\x00\x00", "within a code"),
        (b"\x00\x82\x1f\xff\x00", "within a code"),
    ],
)
def test_a_block_that_makes_no_sense_says_why(block: bytes, why: str) -> None:
    with pytest.raises(HpackError, match=why):
        Decoder().decode(block)


def test_a_table_may_be_full_to_the_last_octet() -> None:
    decoder = Decoder()
    two_entries = 2 * (len("a1") + 32)
    decoder.decode(b"\x3f" + bytes((two_entries - 0x1F,)) + b"\x40\x01a\x011" + b"\x40\x01b\x012")
    assert decoder.decode(b"\xbe\xbf") == [(b"b", b"2"), (b"a", b"1")]
    decoder.decode(b"\x40\x01c\x013")
    assert decoder.decode(b"\xbe\xbf") == [(b"c", b"3"), (b"b", b"2")]


def test_a_few_octets_that_spell_megabytes_are_not_spelt_out_and_the_next_block_is_read() -> None:
    decoder = Decoder()
    value = b"v" * 3000
    entry = b"\x40\x01k" + length_of(value) + value
    assert decoder.decode(entry) == [(b"k", value)]
    assert decoder.decode(b"\xbe" * (LARGEST_LIST // 3000 + 1)) is None
    assert decoder.decode(b"\xbe") == [(b"k", value)]


@given(octets=st.binary(max_size=100))
def test_any_octets_survive_their_huffman_code(octets: bytes) -> None:
    encoder = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)
    assert huffman_decode(encoder.encode(octets)) == octets


@given(
    name=st.sampled_from([b":path", b":authority", b"apns-id", b"content-length"])
    | st.binary(min_size=1, max_size=300),
    value=st.binary(max_size=2000),
)
def test_what_we_write_another_decoder_reads_and_keeps_nothing_of(name: bytes, value: bytes) -> None:
    theirs = hpack.Decoder()
    block = NO_TABLE + literal_name(name) + length_of(value) + value
    assert [tuple(field) for field in theirs.decode(block, raw=True)] == [(name, value)]
    assert not theirs.header_table.dynamic_entries
    assert theirs.header_table_size == 0


def test_the_authorization_is_marked_never_to_be_indexed_and_the_path_is_no_entry_of_any_table() -> None:
    assert literal_name(b"authorization")[0] & 0xF0 == 0x10
    assert literal_name(b":path")[0] & 0xF0 == 0x00
