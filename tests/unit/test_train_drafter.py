"""`phloem train-drafter`: its module against the paper's reference, batches, resumption, the command on tiny models."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_reference import ReferenceEagle3
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from phloem.errors import PhloemError
from phloem.plugins.command._training import corpus as corpus_module
from phloem.plugins.command._training import head as head_module
from phloem.plugins.command._training.batches import Batch, collate, cropped, order
from phloem.plugins.command._training.corpus import Corpus, Sample
from phloem.plugins.command._training.fit import Fit, Progress, Settings
from phloem.plugins.command._training.head import EagleHead, HeadShape
from phloem.plugins.command._training.record import Text
from phloem.plugins.command._training.vocabulary import DraftVocabulary, most_frequent
from phloem.plugins.command.main import main

VOCAB, HIDDEN, LAYERS = 50, 32, 3
SHAPE = HeadShape(
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    draft_vocab_size=20,
    features=LAYERS,
)
CONFIG = {name: getattr(SHAPE, name) for name in vars(SHAPE)}


def random_head(seed: int = 0) -> EagleHead:
    """Weights large enough that a wrong one shows."""
    torch.manual_seed(seed)
    head = EagleHead(SHAPE)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
    return head


def random_sample(length: int, prompt: int, talk: int = 0) -> Sample:
    """Random states and chances."""
    return Sample(
        talk,
        prompt,
        True,
        torch.randint(VOCAB, (length,), dtype=torch.int32),
        torch.randn(length, LAYERS, HIDDEN).half(),
        torch.stack([torch.randperm(VOCAB)[:6] for _ in range(length)]).int(),
        torch.randn(length, 8)[:, :6].log_softmax(-1).half(),
    )


def odd_ones() -> DraftVocabulary:
    """20 of the 50 tokens."""
    return DraftVocabulary(torch.arange(1, 41, 2), VOCAB)


def test_every_step_gives_what_the_paper_says() -> None:
    """Rows of step k are the reference's k-th draft token behind each prefix; padding changes nothing."""
    head, embed = random_head(), torch.randn(VOCAB, HIDDEN)
    reference = ReferenceEagle3(CONFIG, head.state_dict(), embed)
    samples = [random_sample(9, 3), random_sample(6, 1)]
    batch = collate(samples, LAYERS, odd_ones().index(), torch.device("cpu"))
    hidden = head.fc(batch.features.float())
    view = head.read(hidden, embed[batch.tokens.roll(-1, 1)], batch.at)
    hidden = batch.rows(hidden)
    for k in range(3):
        tokens, valid = batch.step(k)
        hidden = head.step(k, hidden, embed[tokens], view)
        logits = head.logits(hidden)
        for b, one in enumerate(samples):
            features, first = one.states.flatten(1).float(), one.prompt_len - 1
            for row, i in enumerate(range(first, len(one.tokens) - 1 - k)):
                at = reference.start(one.tokens[: i + 2], features)
                for step in range(k):
                    at = reference.step(at, int(one.tokens[i + 2 + step]))
                torch.testing.assert_close(logits[b, row], at.logits, atol=1e-4, rtol=1e-4)
                assert valid[b, row]
            assert not valid[b, len(one.tokens) - 1 - k - first :].any()


def test_the_reference_says_the_same_at_once_and_by_steps() -> None:
    head, embed, one = random_head(), torch.randn(VOCAB, HIDDEN), random_sample(7, 1)
    reference = ReferenceEagle3(CONFIG, head.state_dict(), embed)
    features = one.states.flatten(1).float()
    rows = reference.forward(one.tokens, features)
    assert rows[0].isnan().all()
    torch.testing.assert_close(rows[-1], reference.start(one.tokens, features).logits)


def test_targets_are_those_of_the_token_that_was_read() -> None:
    samples = [random_sample(9, 3), random_sample(5, 2)]
    index = odd_ones().index()
    batch = collate(samples, LAYERS, index, torch.device("cpu"))
    _, valid = batch.step(1)
    best, chances = batch.targets(1, valid)
    rows = [(one, i + 2) for one in samples for i in range(one.prompt_len - 1, len(one.tokens) - 2)]
    assert len(best) == len(rows)
    for got, likely, (one, t) in zip(best, chances, rows, strict=True):
        assert got.tolist() == index[one.best[t].long()].tolist()
        known = got >= 0
        assert (likely[~known] == 0).all()
        torch.testing.assert_close(likely[known], one.chances[t].float().exp()[known])


def test_a_long_prompt_loses_its_beginning_and_an_answer_nothing() -> None:
    long, answer, short = random_sample(500, 300), random_sample(450, 10), random_sample(20, 3)
    assert [len(cropped(one).tokens) for one in (long, answer, short)] == [384, 441, 20]
    ends = cropped(long)
    assert (ends.prompt_len, ends.tokens.tolist()) == (184, long.tokens[116:].tolist())
    assert torch.equal(ends.states, long.states[116:])


def test_each_text_is_in_one_batch_of_an_epoch() -> None:
    samples = [random_sample(length, 1) for length in (3, 9, 9, 4, 12, 5, 5, 5, 7, 2)]
    made = order(samples, 24, 1, 0)
    assert sorted(i for batch in made for i in batch) == list(range(10))
    assert all(len(batch) * max(len(samples[i].tokens) for i in batch) <= 24 for batch in made)
    assert made == order(samples, 24, 1, 0) != order(samples, 24, 1, 1)


def test_the_reduced_vocabulary_goes_there_and_back() -> None:
    sample = random_sample(40, 10)
    vocabulary, share = most_frequent([sample], 8, VOCAB)
    draft = torch.arange(8)
    ids = draft + vocabulary.d2t
    assert ids.tolist() == vocabulary.ids.tolist() == sorted(ids.tolist())
    assert vocabulary.index()[ids].tolist() == draft.tolist()
    assert vocabulary.t2d.nonzero().flatten().tolist() == ids.tolist()
    answers = sample.tokens[10:].tolist()
    assert share == pytest.approx(sum(token in ids.tolist() for token in answers) / 30)
    assert min(map(answers.count, ids.tolist())) >= max(answers.count(t) for t in range(VOCAB) if t not in ids.tolist())


# --- fitting


def fit(samples: list[Sample], **settings: Any) -> Fit:
    """A run over samples, from a seeded start."""
    embed = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    scale = torch.full((LAYERS * HIDDEN,), 2.0)
    given = Settings(**{"epochs": 3, "batch": 40, **settings})
    return Fit(random_head(), samples, odd_ones().index(), scale, embed, given)


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    torch.manual_seed(5)
    samples = [random_sample(10, 3, talk) for talk in range(12)]
    whole = fit(samples)
    whole.run(tmp_path / "whole.pt", lambda: None, lambda part, at: None)

    def stop(part: float, at: Progress) -> None:
        if at.step == 4:
            raise KeyboardInterrupt

    saves: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        fit(samples).run(tmp_path / "parts.pt", lambda: saves.append(1), stop)
    assert saves == [1]
    resumed = fit(samples)
    steps: list[int] = []
    resumed.run(tmp_path / "parts.pt", lambda: None, lambda part, at: steps.append(at.step))
    assert steps[0] == 5
    assert resumed.at.step == whole.at.step
    assert resumed.at.history == whole.at.history
    for name, weight in whole.head.state_dict().items():
        assert torch.equal(weight, resumed.head.state_dict()[name]), name


class Products(TorchDispatchMode):
    """Shapes of all matrix products, those of the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.attention = set[Any](), set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name, seen in (("mm", self.weights), ("bmm", self.attention)):
            if func.overloadpacket.__name__ == name:
                seen.add(tuple(tuple(each.shape) for each in args))
        return func(*args, **(kwargs or {}))


def filled(samples: list[Sample], monkeypatch: pytest.MonkeyPatch, block: int, part: int) -> tuple[Fit, Products]:
    """An epoch, of which the gradients of the last step are kept."""
    monkeypatch.setattr(head_module, "_BLOCK", block)
    monkeypatch.setattr(head_module, "_PART", part)
    run, seen = fit(samples, batch=300), Products()
    with seen:
        while run.at.epoch < 1:
            run._train(0.5)
    return run, seen


def test_what_fills_up_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    samples = [random_sample(length, prompt) for length, prompt in ((9, 3), (70, 2), (70, 66), (64, 1), (5, 4))]
    plain, padded = (filled(samples, monkeypatch, *sizes)[0] for sizes in ((1, 1), (128, 64)))
    assert padded.at.loss == pytest.approx(plain.at.loss, rel=1e-5)
    for (name, mine), theirs in zip(padded.head.named_parameters(), plain.head.parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-3, msg=name)


def test_few_shapes_reach_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps a compiled product for each. A weight has three, for each number of blocks that a batch may have."""
    torch.manual_seed(4)
    lengths = torch.randint(20, 129, (40,)).tolist()
    samples = [random_sample(n, int(torch.randint(1, n - 5, ()))) for n in lengths]
    _, plain = filled(samples, monkeypatch, 1, 1)
    run, padded = filled(samples, monkeypatch, 128, 64)
    shapes = {tuple(weight.shape) for weight in run.head.parameters() if weight.dim() == 2}
    blocks = -(-300 // 128)
    assert len(padded.weights) <= 3 * len(shapes) * blocks < len(plain.weights) / 2
    apart, together = ({(x[1:], y[1:]) for x, y in each.attention} for each in (plain, padded))  # of one text
    assert len(together) <= 4 * 3 < len(apart) / 2  # four products; texts have one part or two, and rows up to that


def test_time_ends_a_run(tmp_path: Path) -> None:
    run = fit([random_sample(10, 3)], epochs=None, minutes=1e-6)
    run.run(tmp_path / "state.pt", lambda: None, lambda part, at: None)
    assert run.at.step == 1


def test_acceptance_counts_what_follows_an_accepted_token_only() -> None:
    """A head that is right at step 0 for the even rows only, and always at step 1."""
    sample = random_sample(12, 1, talk=7)
    index = odd_ones().index()

    class Knows(Fit):
        def _steps(self, batch: Batch) -> Any:
            for k in range(2):
                _, valid = batch.step(k)
                first = batch.targets(k, valid)[0][:, 0]
                right = torch.ones_like(first, dtype=torch.bool) if k else torch.arange(len(first)) % 2 == 0
                token = torch.where(right & (first >= 0), first, (first + 1) % 20)
                yield k, valid, torch.nn.functional.one_hot(token, 20).float()

    run = Knows(
        random_head(), [sample], index, torch.ones(LAYERS * HIDDEN), torch.randn(VOCAB, HIDDEN), Settings(1, steps=2)
    )
    quality = run.measure()
    known = [int(index[int(token)]) >= 0 for token in sample.best[:, 0]]
    zero = [i for i in range(11) if i % 2 == 0 and known[i + 1]]
    one = [i for i in zero if i < 10]
    both = [i for i in one if known[i + 2]]
    assert quality.acceptance == (len(zero) / 11, len(both) / len(one))
    assert quality.tokens == pytest.approx(1 + len(zero) / 11 + len(zero) / 11 * len(both) / len(one))


# --- files


def test_a_round_is_kept_whole(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "c", {"target": "t"})
    states = torch.randn(5, LAYERS, HIDDEN).half()
    best, chances = torch.randint(VOCAB, (5, 4)).int(), torch.randn(5, 4).half()
    corpus.add(0, [(3, Text([1, 2, 3, 4, 5], 2, True, states), best, chances)] * 2)
    assert corpus.answers() == 6
    assert corpus.prompts() == {(1, 2)}
    corpus.add(1, [(4, Text([1, 2, 3], 1, True, states[:3]), best[:3], chances[:3])])
    assert [len(corpus.first(tokens)) for tokens in (1, 6, 7, 100)] == [1, 1, 2, 2]
    assert [one.talk for one in corpus.samples(corpus.first(6))] == [3, 3]
    one = list(corpus.samples())[1]
    assert (one.talk, one.prompt_len, one.greedy, one.tokens.tolist()) == (3, 2, True, [1, 2, 3, 4, 5])
    for mine, kept in ((states, one.states), (best, one.best), (chances, one.chances)):
        assert torch.equal(mine, kept)


def test_a_full_disk_is_one_message_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = Corpus(tmp_path, {})
    text = (0, Text([1, 2], 1, True, torch.zeros(2, 1, 4).half()), torch.zeros(2, 1).int(), torch.zeros(2, 1).half())
    corpus.add(0, [text])

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(corpus_module, "save_file", full)
    with pytest.raises(PhloemError, match="is full"):
        corpus.add(1, [text])
    assert len(corpus.rounds) == 1


# --- the command


def command(*words: object) -> int:
    """Its exit code."""
    return main(["train-drafter", "eagle", *map(str, words)])


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some prompts of all forms."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = ["The sugar a leaf makes", json.dumps("A tree of tokens"), json.dumps({"prompt": "def match"})]
    lines += [json.dumps({"messages": [{"role": "user", "content": f"{i} quick foxes"}]}) for i in range(45)]
    file.write_text("\n".join(lines) + "\n\n")
    return file


def test_a_head_from_nothing(tiny_model: Callable[[str], Path], tmp_path: Path, prompts_file: Path) -> None:
    """Texts, training and files; the same command again does nothing more, and writes the same head."""
    words = ["--target", tiny_model("llama"), "--prompts", prompts_file, "--work", tmp_path / "work", "--vocab", 64]
    words += ["--tokens", 600, "--talks", 16, "--epochs", 2, "--steps", 2, "--threads", 1, "--out", tmp_path / "head"]
    words += ["--set", "cache.tokens=8192"]
    assert command(*words) == 0
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert (config["format"], config["version"], config["algorithm"]) == ("phloem-eagle", 1, "eagle3")
    assert config["target"] == {"name": "llama", "hidden_size": 64, "vocab_size": 512, "depth": 3}
    assert config["layers"] == [0, 1, 3]
    assert config["training"]["epochs"] == 2
    assert "--tokens 600" in config["training"]["command"]
    assert tensors["fc.weight"].shape == (64, 192)
    assert tensors["lm_head.weight"].shape == (64, 64)
    assert tensors["lm_head.weight"].dtype == torch.float16
    assert tensors["t2d"].sum() == 64
    assert command(*words) == 0
    again = load_file(tmp_path / "head" / "model.safetensors")
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]


def test_what_is_refused(tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, bad, empty = tmp_path / "other", tmp_path / "bad.jsonl", tmp_path / "empty"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    bad.write_text('{"messages": [{"role": "assistant", "content": "x"}]}\n')
    empty.write_text("\n")
    work = ["--work", tmp_path / "work", "--threads", 1]
    for words, code, message in (
        (["--out", other], 2, "it holds something else: thesis.tex"),
        (["--out", bad], 2, "it is a file"),
        (["--out", tmp_path / "a", "--prompts", tmp_path / "nowhere"], 2, "No such file"),
        (["--out", tmp_path / "a", "--prompts", bad], 2, "bad.jsonl:1: expected a text, or `messages`"),
        (["--out", tmp_path / "a", "--prompts", empty], 2, "it has no prompts"),
        (["--out", tmp_path / "a", "--target", "smollm"], 1, "smollm"),
        (["--out", tmp_path / "a", "--target", tiny_model("mamba2")], 1, "has recurrent layers only"),
        (["--out", tmp_path / "a", "--target", tiny_model("llama"), "--layers", "1,9"], 2, "hidden states of layer 9"),
    ):
        assert command(*words, *work) == code, capsys.readouterr().err
        assert message in capsys.readouterr().err
