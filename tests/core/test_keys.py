"""Equal keys mean equal bytes: whatever can change a page's bytes changes its key."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayhicache.core.keys import (
    CHUNK_TOKENS,
    KEY_BYTES,
    InputSpan,
    Namespace,
    PageKey,
    joined,
    page_keys,
    token_buffer,
)
from rayhicache.errors import InvalidRequest

HERE = Namespace(
    model="glm",
    revision="r1",
    config_digest="c1",
    weights_version=1,
    adapter="",
    salt="",
    dtype="float32",
    page_tokens=4,
    layout_fingerprint="l1",
    parallel_shape="",
)
TOKENS = list(range(100, 112))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def keys_under(namespace: Namespace) -> list[PageKey]:
    return page_keys(namespace.seed(), TOKENS, 4)


@pytest.mark.parametrize("name", [field.name for field in fields(Namespace)])
def test_changing_any_one_field_of_the_identity_changes_every_key(name: str) -> None:
    """R18 and R27: no field is forgotten, a new one included."""
    value = getattr(HERE, name)
    change: dict[str, Any] = {name: value + 1 if isinstance(value, int) else value + "x"}
    other = replace(HERE, **change)
    assert not set(keys_under(HERE)) & set(keys_under(other))


def test_new_weights_make_every_earlier_page_miss() -> None:
    """R19, the key part."""
    updated = replace(HERE, weights_version=HERE.weights_version + 1)
    assert not set(keys_under(HERE)) & set(keys_under(updated))


@pytest.mark.parametrize(
    ("first", "second"), [("model", "revision"), ("adapter", "salt"), ("config_digest", "dtype")]
)
def test_shifted_separators_do_not_collide(first: str, second: str) -> None:
    """R18: "a" + "bc" is not "ab" + "c"."""
    one: dict[str, Any] = {first: "a", second: "bc"}
    two: dict[str, Any] = {first: "ab", second: "c"}
    assert replace(HERE, **one).seed() != replace(HERE, **two).seed()


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_joined_parts_can_be_told_apart(one: list[bytes], two: list[bytes]) -> None:
    assert (joined(*one) == joined(*two)) == (one == two)


@given(tokens, tokens)
def test_equal_prefixes_have_equal_keys_and_the_first_other_token_ends_it(
    one: list[int], two: list[int]
) -> None:
    a, b = (page_keys(HERE.seed(), ids, 4) for ids in (one, two))
    for page, (left, right) in enumerate(zip(a, b, strict=False)):
        upto = 4 * (page + 1)
        assert (left == right) == (one[:upto] == two[:upto])


@given(tokens, st.integers(0, 10))
def test_keys_of_a_continued_prompt_are_those_of_the_whole(ids: list[int], cut: int) -> None:
    whole = page_keys(HERE.seed(), ids, 4)
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else HERE.seed()
    rest = page_keys(parent, ids[4 * cut :], 4, first_token=4 * cut)
    assert whole[:cut] + rest == whole


def test_keys_are_the_chained_hash_that_the_format_says() -> None:
    """Arenas outlive a version of this code, so its keys must stay what they are."""
    key: bytes = HERE.seed()
    wanted = []
    for page in range(3):
        ids = b"".join(token.to_bytes(4, "little") for token in TOKENS[4 * page : 4 * page + 4])
        key = hashlib.blake2b(key + ids, digest_size=16).digest()
        wanted.append(key)
    assert keys_under(HERE) == wanted


def test_a_prompt_of_many_chunks_has_the_keys_of_its_pages() -> None:
    ids = list(range(3 * CHUNK_TOKENS + 10))
    whole = page_keys(HERE.seed(), ids, 48)
    cut = page_keys(HERE.seed(), ids[: 48 * 100], 48)
    rest = page_keys(cut[-1], ids[48 * 100 :], 48, first_token=48 * 100)
    assert whole == cut + rest
    assert len(whole) == len(ids) // 48


def test_only_whole_pages_have_keys() -> None:
    assert [len(page_keys(HERE.seed(), TOKENS[:n], 4)) for n in (0, 3, 4, 7, 12)] == [0, 0, 1, 1, 3]
    assert {len(key) for key in keys_under(HERE)} == {KEY_BYTES}


def with_image(start: int, stop: int, digest: bytes) -> list[PageKey]:
    return page_keys(HERE.seed(), TOKENS, 4, [InputSpan(start=start, stop=stop, digest=digest)])


def test_the_same_placeholder_ids_with_another_image_miss() -> None:
    """R32: from the image's first page on; the pages before it are shared."""
    cat, dog, bare = with_image(5, 7, b"cat"), with_image(5, 7, b"dog"), keys_under(HERE)
    assert cat == with_image(5, 7, b"cat")
    assert cat[0] == dog[0] == bare[0]
    assert len({cat[1], dog[1], bare[1]}) == 3
    assert len({cat[2], dog[2], bare[2]}) == 3


def test_the_same_image_elsewhere_in_its_page_misses() -> None:
    assert with_image(4, 6, b"cat")[1] != with_image(5, 7, b"cat")[1]


def test_an_image_over_several_pages_is_in_the_keys_of_each() -> None:
    parent = HERE.seed()
    pages = [
        page_keys(parent, TOKENS[4:8], 4, [InputSpan(start=2, stop=12, digest=d)], first_token=4)
        for d in (b"cat", b"dog")
    ]
    assert pages[0] != pages[1]


def test_two_images_on_one_page_do_not_join_into_another_pair() -> None:
    def pair(a: bytes, b: bytes) -> list[PageKey]:
        spans = [InputSpan(start=0, stop=1, digest=a), InputSpan(start=0, stop=1, digest=b)]
        return page_keys(HERE.seed(), TOKENS, 4, spans)

    assert pair(b"a", b"bc") != pair(b"ab", b"c")


def test_ids_up_to_32_bits_are_hashed() -> None:
    assert token_buffer([0, 1, 2**32 - 1]) == bytes(4) + b"\1\0\0\0" + b"\xff" * 4


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.5, "7", None])
def test_an_id_that_is_no_uint32_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="2\\*\\*32"):
        token_buffer([1, wrong])
