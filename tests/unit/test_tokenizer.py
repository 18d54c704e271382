"""The tokenizer equals transformers' on odd texts, for GGUF files and folders."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import support
from gguf_files import convert, write_sentencepiece

from phloem.errors import ModelError, RequestError
from phloem.interfaces import TokenizerData
from phloem.plugins.model._source import open_source
from phloem.plugins.model._source.bpe_merges import merges_by_position, merges_by_score
from phloem.plugins.model._source.gguf_file import GgufFile
from phloem.plugins.model._source.gguf_tokenizer import tokenizer_from_gguf
from phloem.tokenizer import Tokenizer

Tiny = Callable[[str], Path]
ODD = [
    "", " ", "  ", "\n", "\r\n", "\t", "   \n  \n", "a", "Hello, world!", " leading", "  two",
    "trailing  ", "\t\ttabs\tbetween\t", "line\r\nfeeds\r\n\r\nand\n\n\nmore\r", "runs    of     spaces",
    "x  12   345      6", "2024-01-01 3.14159 1,000,000 ½ ² Ⅷ ٣", "I'll they're DON'T it'S 'quoted'",
    "==== ---- //// ____ ::::", "    def f(x):\n        return x  # 1\n", "你好，世界！",
    "日本語のテキスト、カタカナ。", "한국어 텍스트", "العربية עברית ไทย हिन्दी", "🙂🌳🚀",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽", "e\u0301a\u0308o\u0302 naïve café", "Z̷̢̛͎a̶l̴g̸o̵",
    "\u200b\u200d\u2060\ufeff", "\u00a0nbsp\u2003em\u3000wide", "𝕳𝖊𝖑𝖑𝖔 𐍈 𒀀", "\x00\x01\x1b\x7f\x85",
    "\ufffd\uffff\U0010ffff\ue000", "a" * 5000, "ab" * 700 + " " + "你" * 900,
    "<|im_start|>user\nhi<|im_end|>", "<bos>x<eos><pad><unk><mask>", "<end_of_turn><start_of_turn>model",
    "<unused5>", "<|endoftext|> <|im_end|>", "text<s>inside</s>text", "<0x0A><0xE4>", "▁lower▁block",
    "{\"json\": [1, 2.5e-3, null]}", "https://example.org/a?b=c&d=%20#e", "ﬁ ﬀ ß ẞ İ ı", "Ünïcödé ÀÉÎ",
    "\u202eright to left\u202c",
]  # fmt: skip
MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": " What is 2 + 2? "}],
    [
        {"role": "user", "content": "你好 🙂"},
        {"role": "assistant", "content": "<|im_end|> in text"},
        {"role": "user", "content": ""},
    ],
]


def texts() -> list[str]:
    """ODD, and 200 seeded mixtures of all planes."""
    source = random.Random(0)
    pools = [
        range(0x20, 0x7F),
        range(0xA0, 0x3000),
        range(0x4E00, 0x9FFF),
        range(0x1F300, 0x1FAFF),
        range(0x300, 0x370),
    ]
    spaces = " \n\t\r"

    def char() -> str:
        if source.random() < 0.25:
            return source.choice(spaces) * source.randint(1, 3)
        return chr(source.choice(source.choice(pools)))

    return ODD + ["".join(char() for _ in range(source.randint(1, 60))) for _ in range(200)]


def assert_equal(mine: Tokenizer, reference: Any, foreign: tuple[str, ...] = ()) -> None:
    """Same ids with and without special tokens, same texts back, for all odd texts.

    `foreign`: tokens that transformers adds although the file has none such; texts with them are left out.
    """
    for text in texts():
        if any(token in text for token in foreign):
            continue
        for special in (True, False):
            ids = mine.encode(text, special)
            assert ids == reference.encode(text, add_special_tokens=special), repr(text)
            for skip in (True, False):
                assert mine.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), repr(text)
                cut = ids[len(ids) // 3 :][:5]
                assert mine.decode(cut, skip) == reference.decode(cut, skip_special_tokens=skip), repr(text)


def assert_chats_equal(mine: Tokenizer, reference: Any) -> None:
    """Same prompt ids for all chats, with and without the opening of the answer."""
    for messages in MESSAGES:
        for opening in (True, False):
            expected = reference.apply_chat_template(messages, add_generation_prompt=opening, return_dict=False)
            assert mine.chat(messages, add_generation_prompt=opening) == expected


@cache
def real(name: str) -> tuple[Tokenizer, Any]:
    """Ours, and the one that transformers made from the same GGUF file and saved."""
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(support.hf_folder(name))
    return Tokenizer(open_source(support.real_path(name)).tokenizer()), reference


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_gguf_equals_transformers(name: str) -> None:
    mine, reference = real(name)
    assert_equal(mine, reference)
    assert mine.vocab_size == len(reference)
    added = reference.added_tokens_decoder
    assert mine.special_ids == {i for i, token in added.items() if token.special}
    assert (mine.bos_token_id, mine.eos_token_id) == (reference.bos_token_id, reference.eos_token_id)
    assert mine.special_tokens.items() <= reference.special_tokens_map.items()


@pytest.mark.real
def test_real_chat_equals_transformers() -> None:
    assert_chats_equal(*real("smollm2-135m"))


@pytest.mark.real
def test_real_model_without_template_refuses_chat() -> None:
    with pytest.raises(RequestError, match="this model has no chat template") as caught:
        real("gemma3-270m")[0].chat([{"role": "user", "content": "Hi"}])
    assert caught.value.param == "messages"


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_token_bytes_join_to_the_text(name: str) -> None:
    mine, _ = real(name)
    for text in texts():
        if "\u2581" in text:
            continue  # SentencePiece's spelling of a space comes back as a space
        ids = mine.encode(text, add_special=False)
        assert b"".join(map(mine.token_bytes, ids)).decode() == mine.decode(ids, skip_special_tokens=False) == text


@pytest.mark.real
def test_partial_characters_are_replacement_characters() -> None:
    smollm, _ = real("smollm2-135m")
    gemma, _ = real("gemma3-270m")
    bytewise = smollm.encode("𒀀", add_special=False)
    assert len(bytewise) > 1
    assert smollm.decode(bytewise[:1]) == "\ufffd"
    pieces = gemma.encode("\U0010ffff", add_special=False)
    assert [gemma.token_bytes(token) for token in pieces] == [b"\xf4", b"\x8f", b"\xbf", b"\xbf"]
    assert gemma.decode(pieces[:3]) == "\ufffd" * 3
    assert gemma.token_text(pieces[0]) == "\ufffd"


def folder_tokenizer(folder: Path) -> Tokenizer:
    """Ours, from a folder."""
    return Tokenizer(open_source(str(folder)).tokenizer())


def test_folder_equals_transformers(tiny_model: Tiny) -> None:
    import transformers

    mine = folder_tokenizer(tiny_model("llama"))
    reference = transformers.AutoTokenizer.from_pretrained(tiny_model("llama"))
    assert_equal(mine, reference)
    assert_chats_equal(mine, reference)


@pytest.mark.parametrize("flags", [{"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_folder_flags_as_transformers(tiny_model: Tiny, tmp_path: Path, flags: dict[str, bool]) -> None:
    import transformers

    folder = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | flags))
    mine, reference = folder_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert mine.encode("Hello") == reference.encode("Hello")
    assert mine.encode("Hello", add_special=False) == reference.encode("Hello", add_special_tokens=False)


def test_folder_chat_template_files(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    named = [{"name": "default", "template": "in config"}, {"name": "tool_use", "template": "no"}]
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": named}))
    assert open_source(str(folder)).tokenizer().chat_template == "in config"
    (folder / "chat_template.json").write_text('{"chat_template": "in json"}')
    assert open_source(str(folder)).tokenizer().chat_template == "in json"
    (folder / "chat_template.jinja").write_text("in jinja")
    assert open_source(str(folder)).tokenizer().chat_template == "in jinja"


def test_folder_special_tokens_may_be_objects(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    config = {"eos_token": {"content": "</s>", "lstrip": False}, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    mine = folder_tokenizer(folder)
    assert (mine.special_tokens, mine.eos_token_id, mine.bos_token_id) == ({"eos_token": "</s>"}, 1, None)


def test_gguf_byte_level_equals_folder(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = folder_tokenizer(tiny_model("llama"))
    source = open_source(str(convert(tiny_model("llama"), tmp_path / "m.gguf", "llama")))
    mine = Tokenizer(source.tokenizer())
    for text in texts():
        assert mine.encode(text) == folder.encode(text), repr(text)
    assert mine.chat(MESSAGES[1]) == folder.chat(MESSAGES[1])


@pytest.mark.parametrize("pre", ["qwen2", "gpt-4o", "deepseek-r1-qwen"])
def test_gguf_word_splitting_equals_transformers(tiny_model: Tiny, tmp_path: Path, pre: str) -> None:
    import transformers

    file = convert(tiny_model("llama"), tmp_path / "m.gguf", "llama", pre=pre)
    mine = Tokenizer(open_source(str(file)).tokenizer())
    assert_equal(
        mine, transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=file.name), ("<|endoftext|>",)
    )


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken"])
def test_gguf_word_splitting_that_starts_with_bos(tiny_model: Tiny, tmp_path: Path, pre: str) -> None:
    import transformers

    file = convert(tiny_model("llama"), tmp_path / "m.gguf", "llama", pre=pre)
    mine = Tokenizer(open_source(str(file)).tokenizer())
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=file.name)
    for text in texts():
        plain = mine.encode(text, add_special=False)
        assert mine.encode(text) == [0, *plain]
        words, expected = (t.pre_tokenizer.pre_tokenize_str(text) for t in (mine._backend, reference._tokenizer))
        assert words == expected


@pytest.mark.parametrize("pre", ["wavelet", None, "default"])
def test_gguf_unknown_word_splitting_is_refused(tiny_model: Tiny, tmp_path: Path, pre: str | None) -> None:
    file = convert(tiny_model("llama"), tmp_path / "m.gguf", "llama", pre=pre)
    with pytest.raises(ModelError, match=f"splits words by the rule '{pre}', which is not known") as caught:
        open_source(str(file)).tokenizer()
    assert "gpt-2" in str(caught.value)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_gguf_sentencepiece_equals_transformers(tmp_path: Path, arch: str) -> None:
    import transformers

    file = write_sentencepiece(tmp_path / "m.gguf", arch=arch)
    mine = Tokenizer(tokenizer_from_gguf(GgufFile(file)))
    architecture = {"llama": transformers.LlamaTokenizer, "gemma3": transformers.GemmaTokenizer}[arch]
    assert_equal(mine, architecture.from_pretrained(str(tmp_path), gguf_file=file.name), ("<bos>",))
    assert len(mine.encode("hello world", add_special=False)) < 5  # merged, not spelled


def test_implied_merges_equal_transformers() -> None:
    from transformers.tokenization_utils_base import generate_merges

    source = random.Random(0)
    tokens = dict.fromkeys("".join(source.choices("abc", k=source.randint(1, 6))) for _ in range(300))
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = {token: source.choice([-1.0, -2.0, -2.5]) for token in vocab}  # with many ties
    assert merges_by_score(vocab, scores) == generate_merges(vocab, scores)
    assert merges_by_position(vocab) == generate_merges(vocab, {token: -i for token, i in vocab.items()})


def test_gguf_sentencepiece_without_prefix(tmp_path: Path) -> None:
    mine = Tokenizer(tokenizer_from_gguf(GgufFile(write_sentencepiece(tmp_path / "m.gguf", prefix=False))))
    ids = mine.encode("hello world", add_special=False)
    assert [mine.token_text(token) for token in ids] == ["hello", " world"]
    assert mine.decode(ids[1:]) == " world"


def test_gguf_unknown_family_is_refused(tmp_path: Path) -> None:
    import gguf
    from gguf_files import close

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("bert")
    writer.add_token_list(["a"])
    close(writer)
    with pytest.raises(ModelError, match="has a tokenizer of type 'bert'"):
        tokenizer_from_gguf(GgufFile(tmp_path / "m.gguf"))
    close(gguf.GGUFWriter(tmp_path / "n.gguf", "llama"))
    with pytest.raises(ModelError, match="has no tokenizer"):
        tokenizer_from_gguf(GgufFile(tmp_path / "n.gguf"))


def test_lone_surrogate_is_a_request_error(tiny_model: Tiny) -> None:
    mine = folder_tokenizer(tiny_model("llama"))
    with pytest.raises(RequestError, match=r"lone surrogate \(U\+D83D\) at character 2") as caught:
        mine.encode("ab\ud83d")
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match=r"lone surrogate") as caught:
        mine.chat([{"role": "user", "content": "\udc00"}])
    assert caught.value.param == "messages"


def test_ids_without_a_token(tiny_model: Tiny) -> None:
    mine = folder_tokenizer(tiny_model("llama"))
    assert mine.token_bytes(100_000) == mine.token_bytes(-1) == b""
    ids = mine.encode("Hello")
    assert mine.decode([*ids, 100_000]) == mine.decode(ids) == "Hello"


def test_truncation_in_the_file_is_undone(tiny_model: Tiny) -> None:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(tiny_model("llama") / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(Tokenizer(TokenizerData(backend.to_str())).encode("the quick brown fox jumps")) not in (4, 64)


def test_unreadable_tokenizer() -> None:
    with pytest.raises(ModelError, match="the model's tokenizer cannot be read"):
        Tokenizer(TokenizerData('{"version": "1.0"}'))


def test_needs_neither_torch_nor_transformers() -> None:
    program = "import sys, phloem.tokenizer; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
