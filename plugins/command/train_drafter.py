"""`phloem train-drafter eagle`: a head that drafts for a model, from texts that the model writes itself."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phloem.errors import ConfigError

from ._arguments import above_zero, natural, positive
from ._machine import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._training.fit import Progress
    from ._training.gather import Target
    from ._training.report import Report

TOKENS, EPOCHS = 300_000, 10


class TrainDrafter:
    """Its arguments and what it does."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """All of them have defaults but `--out`."""
        parser.add_argument("algorithm", choices=["eagle"], help="an EAGLE-3 head: one layer that reads hidden states")
        parser.add_argument("--target", default="smollm2-135m", metavar="MODEL", help="the model it is to draft for")
        parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the head")
        parser.add_argument("--tokens", type=positive, default=TOKENS, help=f"of answers to train on ({TOKENS})")
        parser.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, one a line, instead of its own")
        parser.add_argument("--epochs", type=positive, help=f"passes over the texts (default: {EPOCHS})")
        parser.add_argument("--minutes", type=above_zero, help="end after this time; alone, or before --epochs")
        parser.add_argument("--vocab", type=positive, default=4096, help="tokens that it may draft (4096)")
        parser.add_argument(
            "--layers", type=_layers, default=(), help="which states it reads: 9,18,30 (default: three)"
        )
        parser.add_argument("--steps", type=positive, default=3, help="of the training-time test (3)")
        parser.add_argument("--rate", type=above_zero, default=1e-3, help="learning rate (0.001)")
        parser.add_argument("--batch", type=positive, default=2048, help="tokens of a training step (2048)")
        parser.add_argument("--talks", type=positive, default=128, help="conversations generated at a time (128)")
        parser.add_argument("--seed", type=natural, default=0, help="of texts and training")
        parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: a GPU where there is one)")
        parser.add_argument("--threads", type=positive, help="CPU threads")
        parser.add_argument("--precision", choices=["auto", "float32", "bfloat16"], default="auto", help="of training")
        parser.add_argument("--work", type=Path, metavar="DIR", help="where texts and unfinished runs are kept")
        parser.add_argument("--set", dest="sets", action="append", default=[], metavar="SECTION.OPTION=VALUE")

    def run(self, args: argparse.Namespace) -> int:
        """Generate what is missing, train on it, write the head. Raises ConfigError, ModelError, PhloemError."""
        from ._training.checkpoint import check_folder

        check_folder(args.out)
        texts = _texts(args)
        target = _gather(args, texts)
        _fit(args, texts, target)
        return 0


train_drafter = TrainDrafter()


def _layers(text: str) -> tuple[int, ...]:
    return tuple(natural(part) for part in text.split(","))


def _texts(args: argparse.Namespace) -> dict[str, Any]:
    """What decides the texts: they are kept under its hash, so that another command finds them if it may have them."""
    prompts = args.prompts and hashlib.sha256(_bytes(args.prompts)).hexdigest()
    return {
        "target": args.target,
        "layers": list(args.layers),
        "seed": args.seed,
        "prompts": prompts,
        "talks": args.talks,
        "set": sorted(args.sets),
    }


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--prompts {path}: {error.strerror}") from error


def _hash(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:10]


def _folder(args: argparse.Namespace, texts: dict[str, Any]) -> Path:
    work: Path = args.work or Path.home() / ".cache" / "phloem" / "training"
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(args.target).name)
    return work / f"{name}-{_hash(texts)}"


def _device(args: argparse.Namespace) -> str:
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    return str(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)


def _gather(args: argparse.Namespace, texts: dict[str, Any]) -> Target:
    """The corpus, complete."""
    from ._training.corpus import Corpus
    from ._training.gather import Wanted, gather, read_prompts
    from ._training.report import Report

    engine = {"draft_size": "fixed", "device": _device(args), **({"threads": args.threads} if args.threads else {})}
    prompts = read_prompts(args.prompts) if args.prompts else None
    wanted = Wanted(args.tokens, args.layers, args.seed, prompts, args.talks)
    sections = {"model": {"path": args.target}, "engine": engine}
    with Report("texts") as report:

        def tell(done: int) -> None:
            report.update(done / args.tokens, f"{done} of {args.tokens} tokens of answers")

        return gather(Corpus(_folder(args, texts), texts), wanted, sections, args.sets, tell)


def _fit(args: argparse.Namespace, texts: dict[str, Any], target: Target) -> None:
    """Train, and write the head once a minute and at the end."""
    from ._training.batches import held_out
    from ._training.checkpoint import write_head
    from ._training.corpus import Corpus
    from ._training.fit import Fit, Settings
    from ._training.report import Report
    from ._training.start import feature_scale, new_head, shape_for
    from ._training.vocabulary import most_frequent

    corpus = Corpus(_folder(args, texts), texts)
    rounds = corpus.first(args.tokens)
    samples = list(corpus.samples(rounds))
    known = [one for one in samples if not held_out(one)]
    if not known:
        raise ConfigError("the target wrote no answers to train on", hint="raise --tokens, or bring --prompts")
    vocabulary, share = most_frequent(known, args.vocab, target.facts["vocab_size"])
    scale = feature_scale(known, len(target.facts["layers"]))
    epochs = args.epochs or (None if args.minutes else EPOCHS)
    device = _device(args)
    half = _half(args, device)
    settings = Settings(epochs, args.minutes, args.steps, args.rate, args.batch, args.seed, device, half)
    head = new_head(shape_for(target.facts, len(vocabulary.ids)), target, vocabulary, scale, args.seed)
    fit = Fit(head, samples, vocabulary.index(), scale, target.embed, settings)
    run = [len(rounds), args.vocab, args.steps, args.rate, args.batch, args.seed, half]
    facts = {**target.facts, "name": Path(args.target).name}  # no path of this machine
    answers = sum(len(one.tokens) - one.prompt_len for one in known)
    training: dict[str, Any] = {"command": _command(args), "texts": len(known), "tokens": answers}

    def save() -> None:
        done = {"epochs": fit.at.epoch, "minutes": round(fit.at.elapsed / 60, 1), "history": fit.at.history[-1:]}
        write_head(args.out, head, scale, vocabulary, facts, training | done)

    with Report("training") as report:
        report.line(f"{len(known)} texts, {len(vocabulary.ids)} draft tokens cover {100 * share:.1f} % of the answers")
        quality = fit.run(corpus.folder / f"run-{_hash(run)}.pt", save, _teller(report))
        report.line(f"{args.out}: {quality}")


def _teller(report: Report) -> Callable[[float, Progress], None]:
    """Shows where a run stands, and each new line of its history."""
    told = [0]

    def tell(part: float, at: Progress) -> None:
        report.update(part, f"{at.step} steps, {at.epoch} epochs, loss {at.loss:.3f}")
        for line in at.history[told[0] :]:
            report.line(line)
        told[0] = len(at.history)

    return tell


def _half(args: argparse.Namespace, device: str) -> bool:
    """Whether bfloat16 is worth it: on accelerators, and on CPUs with tiles for it."""
    able = device != "cpu" or "amx_bf16" in describe()["flags"]
    return args.precision == "bfloat16" or (args.precision == "auto" and able)


def _command(args: argparse.Namespace) -> str:
    """The command that gives this head again, but for what only this machine has."""
    words = ["phloem", "train-drafter", args.algorithm]
    for name in (
        "target",
        "tokens",
        "epochs",
        "minutes",
        "vocab",
        "steps",
        "rate",
        "batch",
        "talks",
        "seed",
        "precision",
    ):
        value = getattr(args, name)
        words += [f"--{name}", str(value)] if value is not None else []
    words += ["--layers", ",".join(map(str, args.layers))] if args.layers else []
    words += [word for each in args.sets for word in ("--set", each)]
    return shlex.join([*words, "--out", "DIR"])
