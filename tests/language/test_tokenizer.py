import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.language import tokenizer as module
from espalier.language.tokenizer import HfTokenizer, open_tokenizer
from espalier.recipe.errors import UserError

TEXTS = ["def plus(a, b):\n    return a + b\n", "the tree grows on the frame there is\n", "größe = 'Ā é 漢 🌳'\n"] * 20

any_text = st.text().map(lambda text: text.replace("\0", " "))


@pytest.fixture(scope="module")
def bpe():
    return open_tokenizer("bpe:400", lambda: TEXTS)


@given(any_text)
def test_bytes_round_trip_any_text(text):
    tokenizer = open_tokenizer("bytes")
    ids = tokenizer.encode(text.encode())
    assert ids.dtype == np.uint8
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


def test_bytes_decode_leaves_out_boundaries_and_replaces_broken_characters():
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.decode([0, 65, 0, 0xFF, 66]) == "A\ufffdB"
    assert tokenizer.byte_lengths[tokenizer.boundary] == 0


@pytest.fixture(scope="module")
def saved_bytes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    open_tokenizer("bytes").save(folder)
    return folder


@given(text=st.text())
def test_saved_bytes_tokenizer_gives_the_same_ids_in_tokenizers(saved_bytes, text):
    theirs = tokenizers.Tokenizer.from_file(str(saved_bytes / "tokenizer.json"))
    ours = open_tokenizer("bytes")
    ids = theirs.encode(text).ids
    assert ids == [ours.boundary, *ours.encode(text.encode()).tolist()]
    assert theirs.decode(ids) == ours.decode(ids)


def test_saved_bytes_tokenizer_works_in_transformers(saved_bytes):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(saved_bytes)
    text = "if x:  # Ā, é, 漢 and <|endoftext|> ,\n\treturn 'x' .\r\n"
    assert len(theirs) == 256
    assert theirs.eos_token_id == theirs.bos_token_id == 0
    assert theirs(text).input_ids == [0, *text.encode()]
    assert theirs.decode(list(text.encode())) == text


@settings(deadline=None)
@given(any_text)
def test_trained_bpe_round_trips_any_text_and_its_byte_lengths_are_exact(bpe, text):
    ids = bpe.encode(text.encode())
    assert ids.dtype == np.uint16
    assert bpe.decode(ids) == text
    assert bpe.byte_lengths[ids].sum() == len(text.encode())


def test_bpe_is_shorter_than_bytes_and_as_large_as_asked(bpe):
    text = "".join(TEXTS).encode()
    assert len(bpe.encode(text)) < len(text) / 2
    assert 257 < bpe.vocabulary <= 400
    assert bpe.byte_lengths[bpe.boundary] == 0


def test_encode_many_equals_encode_one_by_one(bpe):
    texts = [text.encode() for text in TEXTS[:3]] + [b""]
    for one, many in zip([bpe.encode(text) for text in texts], bpe.encode_many(texts), strict=True):
        np.testing.assert_array_equal(one, many)


def test_a_boundary_written_in_a_text_is_text(bpe):
    ids = bpe.encode(b"a <|endoftext|> b")
    assert bpe.boundary not in ids
    assert bpe.decode(ids) == "a <|endoftext|> b"


def test_bpe_training_is_deterministic_across_processes(bpe):
    train = f"open_tokenizer('bpe:400', lambda: {TEXTS!r})"
    program = f"from espalier.language.tokenizer import open_tokenizer; print({train}.fingerprint)"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert other.stdout.strip() == bpe.fingerprint


def test_a_trained_bpe_is_kept_and_not_trained_again(tmp_path, bpe):
    first = open_tokenizer("bpe:400", lambda: TEXTS, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bpe-400.json"]
    again = open_tokenizer("bpe:400", lambda: pytest.fail("trained again"), tmp_path)
    assert first.fingerprint == again.fingerprint == bpe.fingerprint


def test_bpe_reads_no_more_of_the_corpus_than_its_sample(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE", 100)

    def corpus():
        for _ in range(10):
            yield "abcd " * 10
        pytest.fail("read on past the sample")

    assert open_tokenizer("bpe:300", corpus).vocabulary > 257


def test_saved_tokenizer_opens_again_as_the_same(tmp_path, bpe):
    bpe.save(tmp_path)
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        again = open_tokenizer(str(spec))
        assert (again.fingerprint, again.boundary, again.vocabulary) == (bpe.fingerprint, bpe.boundary, bpe.vocabulary)
        np.testing.assert_array_equal(again.encode(TEXTS[2].encode()), bpe.encode(TEXTS[2].encode()))


def test_long_documents_are_encoded_in_pieces_and_lose_nothing(monkeypatch, bpe):
    text = ("".join(TEXTS) + "漢" * 200).encode()
    whole = bpe.encode(text)
    monkeypatch.setattr(module, "PIECE", 64)
    assert max(len(piece) for piece in module._pieces(text)) <= 64
    ids = bpe.encode(text)
    assert bpe.decode(ids) == bpe.decode(whole) == text.decode()


def test_a_tokenizer_without_boundary_gets_one():
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    opened = HfTokenizer(inner, "two letters")
    assert opened.boundary == 2
    assert opened.vocabulary == 3
    assert opened.encode(b"abba").tolist() == [0, 1, 1, 0]


def test_the_stated_end_of_text_is_the_boundary(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "</s>": 1, "<stop>": 2}, merges=[]))
    inner.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(str(tmp_path)).boundary == 1
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}, "bos_token": null}')
    opened = open_tokenizer(str(tmp_path))
    assert opened.boundary == 2
    opened.save(tmp_path / "out")
    assert "<stop>" in (tmp_path / "out/tokenizer_config.json").read_text()


def test_byte_fallback_tokens_count_one_byte_each():
    table = {"▁a": 0, "é": 1, "<0xE6>": 2, "<0xBC>": 3, "<0xA2>": 4, "</s>": 5, "▁": 6, "a": 7}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=table, merges=[("▁", "a")], byte_fallback=True))
    inner.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    opened = HfTokenizer(inner, "fallback")
    text = " aé漢".encode()
    ids = opened.encode(text)
    assert ids.tolist() == [0, 1, 2, 3, 4]
    assert opened.byte_lengths[ids].sum() == len(text)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("byte", "did you mean bytes"),
        ("bpe:100", "from 257"),
        ("bpe:many", "from 257"),
        ("missing/tokenizer.json", "known: bytes"),
        ("bpe:300", "trained on the corpus"),
    ],
)
def test_wrong_specs_are_named_with_something_to_try(spec, says):
    with pytest.raises(UserError, match=says) as caught:
        open_tokenizer(spec)
    assert repr(spec) in str(caught.value)
    assert caught.value.do


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
        open_tokenizer(str(tmp_path))
