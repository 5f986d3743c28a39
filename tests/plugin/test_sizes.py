"""Sizes: what people write, in bytes; and what they should not write, refused with what is valid."""

import pytest

from pytest_park import GiB, KiB, MiB, TiB, format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (12345, 12345),
        ("00", 0),
        ("512", 512),
        ("512 B", 512),
        ("1KiB", KiB),
        ("64 MiB", 64 * MiB),
        ("  12  GiB ", 12 * GiB),
        ("12 gib", 12 * GiB),
        ("2 TiB", 2 * TiB),
        ("1.5 KiB", 1536),
        ("1.1 GiB", 1181116006),
    ],
)
def test_a_size_is_bytes_or_a_number_with_a_binary_unit(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["12 gigs", "", "GiB", "12 GB", "12 G", "-1 GiB", "1e9", "1 GiB 2", -1, True, None])
def test_anything_else_is_refused_and_the_message_says_what_is_valid(text):
    with pytest.raises(ValueError, match="GiB") as refusal:
        parse_size(text)
    assert repr(text) in str(refusal.value)


def test_a_decimal_unit_is_refused_with_the_binary_one_that_was_meant():
    with pytest.raises(ValueError, match="did you mean GiB"):
        parse_size("12 GB")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1.00 KiB"),
        (MiB - 1, "1.00 MiB"),
        (11.86 * GiB, "11.86 GiB"),
        (-1.4 * GiB, "-1.40 GiB"),
        (5000 * TiB, "5000.00 TiB"),
    ],
)
def test_bytes_are_shown_in_the_unit_that_a_person_would_choose(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize("size", [0, 1, 512, 64 * MiB, 3 * GiB])
def test_what_is_shown_can_be_read_back(size):
    assert parse_size(format_bytes(size)) == size
