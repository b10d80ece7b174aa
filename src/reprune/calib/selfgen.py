"""Self-generated calibration: documents that the dense model writes, filtered, and kept in the cache.

Source: Shin et al., EMNLP 2024, arXiv:2406.15524, appendix C, after LLM-QAT (Liu et al., 2023): a uniform token, four
greedy ones, a language filter on these, then sampling; the texts serve for reconstruction only. Prefixes and the
perplexity filter are those of Ji et al., ICLR 2025, arXiv:2410.17711; BOS with a temperature schedule those of Williams
et al., NAACL 2025, arXiv:2410.17170. Differences from the authors' code: batches; special tokens are never drawn as a
start and end a text; texts that loop are dropped; the seed decides every token.

Candidates are numbered, and each has its own random numbers, from a hash. The texts that are kept are those of the
first candidates that suffice, so they do not depend on how many were written at once.
"""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from importlib.metadata import version
from itertools import count as count_up
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from reprune.assets import build_once, cache_dir
from reprune.draw import Split, hashed, split_of
from reprune.errors import ConfigError, CorpusError
from reprune.generate import Continuation, Sampling, computing_in, generate
from reprune.interfaces import Corpus, Document, Writer
from reprune.model.fingerprint import fingerprint
from reprune.parts import Part, Use, checked_use
from reprune.terminal import duration, log, progress

FORMAT = 1  # raise it when the same settings give other texts, so that older ones in the cache are not taken for them
PACKAGES = ("torch", "transformers", "tokenizers", "py3langid")  # that decide what is written and kept
TEXTS, MANIFEST = "texts.jsonl", "manifest.json"
SAMPLES = 5
REMEDIES = {  # what most of the candidates were dropped for -> what to try
    "ended in its start": "calib.start=prefix",
    "language of the start": "calib.start_languages=null, or the languages the model writes",
    "language": "calib.languages=null, or the languages the model writes",
    "short": "a lower calib.min_length, or with calib.pack=false a higher calib.max_length",
    "loop": "calib.repetition_penalty=1.2 or a higher calib.temperature",
    "twice": "a higher calib.temperature",
}
NOT_WRITING = ("base", "mode", "generated_count", "use", "batch_size")  # settings that change no text


class Mode(Enum):
    """How generated sequences join the base corpus."""

    add = "add"
    replace = "replace"


class Start(Enum):
    """How a text begins."""

    random_token = "random_token"
    bos = "bos"
    prefix = "prefix"


class Precision(Enum):
    """Number format the model writes in; model: as it was loaded."""

    float64 = "float64"
    float32 = "float32"
    model = "model"


@dataclass(frozen=True)
class Written:
    """The corpus that a model wrote; documents of one split only.

    Attributes:
        pack: as set.
        manifest: how it was written: settings, counts of what was dropped, lengths, seconds, samples.
        kept: the documents.
    """

    pack: bool
    manifest: dict[str, Any]
    kept: list[Document]

    def documents(self) -> list[Document]:
        """Return the documents, in the order they were written."""
        return self.kept

    def revision(self) -> str:
        """Return the key of model, settings and seed."""
        return f"generated:{self.manifest['key']}"


@dataclass(frozen=True)
class _Text:
    """A finished candidate; `dropped` says why it is not kept, None if it is."""

    candidate: str
    text: str
    length: int  # in tokens, as the tokenizer reads the text back
    perplexity: float
    dropped: str | None


@dataclass(frozen=True, kw_only=True)
class SelfGen:
    """Settings; each is explained in conf/calib/selfgen.yaml."""

    base: str
    generated_count: int
    mode: Mode
    use: list[Use]
    start: Start
    greedy_tokens: int
    prefix_tokens: int
    start_languages: list[str] | None
    languages: list[str] | None
    temperature: float
    top_k: int | None
    top_p: float
    repetition_penalty: float
    start_temperature: float | None
    start_tokens: int
    max_length: int
    min_length: int
    pack: bool
    max_repeats: float
    drop_fraction: float
    tries: int
    batch_size: int
    dtype: Precision

    def __post_init__(self) -> None:
        for name, least in (
            ("generated_count", 1), ("greedy_tokens", 0), ("prefix_tokens", 1), ("top_k", 1), ("start_tokens", 1),
            ("min_length", 1), ("tries", 1), ("batch_size", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value}: must be at least {least}.")
        for name in ("temperature", "start_temperature", "repetition_penalty"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value}: must be above 0. top_k=1 is greedy.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}: must be in (0, 1]; 1 leaves all tokens in.")
        if not 0 <= self.drop_fraction < 1:
            raise ConfigError(f"drop_fraction={self.drop_fraction}: must be in [0, 1); 0 keeps all texts.")
        if not 0 < self.max_repeats <= 1:
            raise ConfigError(f"max_repeats={self.max_repeats}: must be in (0, 1]; 1 keeps texts that loop.")
        begin = self.prefix_tokens if self.start is Start.prefix else self.greedy_tokens + 1
        least = max(self.min_length, begin + 1)
        if self.max_length < least:
            raise ConfigError(
                f"max_length={self.max_length}: must be at least {least}, for min_length={self.min_length} "
                f"and a start of {begin} tokens. Raise it, or lower these."
            )
        for name in ("start_languages", "languages"):
            _check_languages(name, getattr(self, name))
        checked_use("use", self.use)

    def parts(self, name: str, count: int) -> list[Part]:
        """Say what calibration is made of if this is all of `calib`: the base corpus and the generated text.

        Raises:
            ConfigError: more is to be replaced than there is.
        """
        left = count - self.generated_count if self.mode is Mode.replace else count
        if left < 0:
            raise ConfigError(
                f"calib.generated_count={self.generated_count} with calib.mode=replace: there are only "
                f"calib.count={count} sequences to replace. Lower it, raise calib.count, or set calib.mode=add."
            )
        return [
            Part(self.base, left, frozenset(Use)),
            Part(name, self.generated_count, frozenset(self.use)),
        ]

    def write(self, writer: Writer, base: Corpus, split: Split, count: int, seq_len: int, draw: int) -> Written:
        """Return text of the model that suffices for `count` sequences; it is written now if it is not in the cache.

        Args:
            writer: the dense model and what belongs to it; the model is left as it was.
            base: the corpus that prefixes come from; only documents of `split` give one.
            split: that the documents will belong to.
            count: sequences.
            seq_len: tokens in each, BOS included.
            draw: index of the draw; no candidate is in two of them.

        Raises:
            CorpusError: too few of the texts pass the filters, the base corpus has too few documents, or the tokenizer
                lacks the token to start with.
        """
        told: dict[str, Any] = {
            "format": FORMAT,
            "model": fingerprint(writer.model, writer.tokenizer),
            "settings": {key: _plain(value) for key, value in asdict(self).items() if key not in NOT_WRITING},
            "bos": writer.bos,
            "seed": writer.seed,
            "draw": draw,
            "split": split.value,
            "count": count,
            "seq_len": seq_len,
            "versions": {name: version(name) for name in PACKAGES},
        }
        if self.start is Start.prefix:
            told["base"] = base.revision()
        key = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]
        folder = cache_dir() / "texts" / f"selfgen-{key}"
        new = False

        def make(target: Path) -> None:
            nonlocal new
            new = True
            begin = time.perf_counter()
            session = _Session(self, writer, base, split, count, seq_len, draw)
            lines = [json.dumps(asdict(text), ensure_ascii=False) for text in session.run()]
            content = ("\n".join(lines) + "\n").encode()
            (target / TEXTS).write_bytes(content)
            manifest = {
                "key": key,
                **told,
                **session.summary(),
                "seconds": round(time.perf_counter() - begin, 2),
                "texts_sha256": hashlib.sha256(content).hexdigest(),
            }
            (target / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

        build_once(folder, make, partial(_damage, key))
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        lines = (folder / TEXTS).read_text(encoding="utf-8").split("\n")[:-1]  # only a line feed ends a line of JSON
        items = [_Text(**json.loads(line)) for line in lines]
        log.info(
            f"text      {manifest['texts']} texts by the model itself, {manifest['lengths']['min']} to "
            f"{manifest['lengths']['max']} tokens, {manifest['accept_rate']:.0%} of {manifest['candidates']} starts, "
            + (f"written in {duration(manifest['seconds'])}" if new else f"from the cache ({folder})")
        )
        return Written(self.pack, manifest, [Document(item.candidate, item.text) for item in items])

    @property
    def sampling(self) -> Sampling:
        """The settings that choose a token."""
        return Sampling(
            self.repetition_penalty,
            self.temperature,
            self.start_temperature,
            self.start_tokens,
            self.top_k,
            self.top_p,
        )


class _Session:
    """Writes one corpus: starts, texts, filters, and the count of what became of each candidate."""

    def __init__(
        self, settings: SelfGen, writer: Writer, base: Corpus, split: Split, count: int, seq_len: int, draw: int
    ) -> None:
        self.settings, self.writer, self.base, self.split = settings, writer, base, split
        self.body = seq_len - writer.bos
        self.count, self.draw = count, draw
        self.tokenizer = writer.tokenizer
        ends = writer.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends] if ends is not None else []
        # Any special token ends a text: what would follow belongs to another text, or to a dialogue.
        self.stop = frozenset([*self.tokenizer.all_special_ids, *ends])
        size = writer.model.config.get_text_config(decoder=True).vocab_size
        self.words = sorted(id for id in set(self.tokenizer.get_vocab().values()) - self.stop if id < size)
        self.limit = settings.tries * count
        self.dropped: dict[str, str] = {}  # candidate -> why it has no text, of those that never got further
        self.order: list[str] = []  # candidates in order
        self.seen: set[str] = set()
        self.texts: list[_Text] = []
        self.enough = False

    def run(self) -> list[_Text]:
        """Write until it suffices, and return the texts that are kept."""
        settings, writer = self.settings, self.writer
        device = writer.device
        if settings.dtype is Precision.float64 and device.type == "mps":
            log.info("text      mps has no float64, so the CPU writes the text (calib.dtype=float32 writes it on mps)")
            device = torch.device("cpu")
        dtype = None if settings.dtype is Precision.model else getattr(torch, settings.dtype.value)
        with (
            progress("tokens of text by the model", self.count * self.body) as tick,
            computing_in(writer.model, device, dtype),
        ):
            starts = self._starts()
            while not self.enough and (group := list(islice(starts, self._rows()))):
                names = [name for name, _ in group]
                prompts = torch.tensor([prompt for _, prompt in group])
                limit = settings.max_length - (prompts.shape[1] - self._given)
                numbers = torch.from_numpy(np.stack([self._numbers(name, limit) for name in names]))
                written = generate(writer.model, prompts, numbers, settings.sampling, limit, self.stop, tick)
                for name, prompt, item in zip(names, prompts.tolist(), written, strict=True):
                    if not self.enough:
                        self.texts.append(self._judged(name, prompt[self._given :], item))
                        self.enough = self._suffices()
        if not self.enough:
            raise CorpusError(self._too_little())
        return self._kept()

    def summary(self) -> dict[str, Any]:
        """Count what became of the candidates, up to the last one that is needed."""
        last = self.order.index(self.texts[-1].candidate) + 1
        kept = self._kept()
        fates = Counter(self.dropped[name] for name in self.order[:last] if name in self.dropped)
        fates.update(text.dropped for text in self.texts if text.dropped)
        passed = sum(text.dropped is None for text in self.texts)
        fates["perplexity"] = passed - len(kept)
        lengths = sorted(text.length for text in kept)
        return {
            "candidates": last,
            "texts": len(kept),
            "tokens": sum(lengths),
            "accept_rate": len(kept) / last,
            "dropped": {why: number for why, number in fates.items() if number},
            "lengths": {"min": lengths[0], "median": median(lengths), "max": lengths[-1]},
            "perplexity": {
                "min": min(text.perplexity for text in kept),
                "median": median(text.perplexity for text in kept),
                "max": max(text.perplexity for text in kept),
            },
            "languages": dict(Counter(_language(text.text) for text in kept).most_common()),
            "samples": [text.text for text in kept[:SAMPLES]],
        }

    # -- starts --------------------------------------------------------------------------------------------------

    @property
    def _given(self) -> int:
        """Tokens at the beginning of a prompt that are no part of the text."""
        return int(self.writer.bos or self.settings.start is Start.bos)

    def _rows(self) -> int:
        """Choose how many texts to write next: about as many as are missing, by what has come of those before."""
        kept = self._kept()
        have = sum(self._worth(text) for text in kept)
        # What a text is worth before any is known: most of a full one, if it is not dropped.
        each = self.settings.max_length * 2 / 3 if self.settings.pack else 1
        worth = have / len(self.texts) if kept else each * (1 - self.settings.drop_fraction)
        missing = math.ceil(1.1 * (self._wanted - have) / worth)
        return max(1, min(self.settings.batch_size, missing))

    def _starts(self) -> Iterator[tuple[str, list[int]]]:
        """Yield candidates that may be written, each with its prompt, in order."""
        names = islice(self._candidates(), self.limit)
        settings = self.settings
        if settings.start is Start.bos:
            bos = self._bos("calib.start=bos")
            for name in names:
                self.order.append(name)
                yield name, [bos]
        elif settings.start is Start.prefix:
            for name, tokens in zip(names, self._prefixes(), strict=False):
                self.order.append(name)
                yield name, self._head() + tokens
        else:
            while group := list(islice(names, settings.batch_size)):
                first = [self.words[int(self._number(name) * len(self.words))] for name in group]
                prompts = torch.tensor([[*self._head(), token] for token in first])
                greedy = generate(self.writer.model, prompts, None, None, settings.greedy_tokens, self.stop)
                for name, prompt, item in zip(group, prompts.tolist(), greedy, strict=True):
                    self.order.append(name)
                    start = [*prompt[self._given :], *item.tokens]
                    if len(item.tokens) < settings.greedy_tokens:
                        self.dropped[name] = "ended in its start"
                    elif not self._speaks(settings.start_languages, self._decoded(start)):
                        self.dropped[name] = "language of the start"
                    else:
                        yield name, prompt + item.tokens

    def _candidates(self) -> Iterator[str]:
        """Yield the ids of this draw that belong to the split."""
        names = (f"{self.draw}-{index}" for index in count_up())
        return (name for name in names if split_of(name) is self.split)

    def _head(self) -> list[int]:
        return [self._bos("model.bos")] if self.writer.bos else []

    def _bos(self, key: str) -> int:
        bos = self.tokenizer.bos_token_id
        if bos is None:
            raise CorpusError(
                f"{key}: the tokenizer has no BOS token to start a text with. Set calib.start=random_token or "
                f"calib.start=prefix, and model.bos=never."
            )
        assert isinstance(bos, int)
        return bos

    def _prefixes(self) -> Iterator[list[int]]:
        salt = f"{self.writer.seed}/prefix/{self.draw}"
        texts = {
            item.id: item.text for item in self.base.documents() if (item.split or split_of(item.id)) is self.split
        }
        for id in sorted(texts, key=lambda id: (hashed(salt, id), id)):
            # Characters enough for the tokens: the whole of a long document would be tokenised for nothing.
            cut = texts[id][: 50 * self.settings.prefix_tokens]
            tokens = self.tokenizer(cut, add_special_tokens=False, verbose=False)["input_ids"]
            if len(tokens) >= self.settings.prefix_tokens:
                yield tokens[: self.settings.prefix_tokens]

    def _numbers(self, name: str, size: int) -> np.ndarray:
        """Return a candidate's numbers in [0, 1): those of a counter-based generator keyed by a hash."""
        raw = np.random.Philox(key=hashed(str(self.writer.seed), "sample", name)).random_raw(size)
        return (raw >> np.uint64(11)) * 2.0**-53

    def _number(self, name: str) -> float:
        return (hashed(str(self.writer.seed), "start", name) >> 11) * 2.0**-53

    # -- texts ---------------------------------------------------------------------------------------------------

    def _judged(self, name: str, start: list[int], written: Continuation) -> _Text:
        """Look at a finished text: its length, and whether a filter drops it."""
        tokens = start + written.tokens
        text = self._decoded(tokens)
        length = len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else 0
        exact = math.exp(min(written.loss / max(1, len(written.tokens)), 700.0))
        perplexity = float(f"{exact:.6g}")  # without the last digits, which depend on the rows beside it
        why = None
        if length < (self.settings.min_length if self.settings.pack else max(self.body, self.settings.min_length)):
            why = "short"
        elif _repeats(tokens) > self.settings.max_repeats:
            why = "loop"
        elif text in self.seen:
            why = "twice"
        elif not self._speaks(self.settings.languages, text):
            why = "language"
        self.seen.add(text)
        return _Text(name, text, length, perplexity, why)

    def _decoded(self, tokens: list[int]) -> str:
        """Return the text of tokens; a character that was cut off at an end is no part of it."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text.strip().strip("\ufffd").strip()

    def _speaks(self, languages: list[str] | None, text: str) -> bool:
        return languages is None or _language(text) in languages

    def _kept(self) -> list[_Text]:
        """Return the texts that pass every filter; the last is by perplexity, so it depends on all of them."""
        passed = [text for text in self.texts if text.dropped is None]
        keep = len(passed) - int(self.settings.drop_fraction * len(passed))
        best = {text.candidate for text in sorted(passed, key=lambda text: text.perplexity)[:keep]}
        return [text for text in passed if text.candidate in best]

    @property
    def _wanted(self) -> int:
        return self.count * self.body if self.settings.pack else self.count

    def _worth(self, text: _Text) -> int:
        return text.length if self.settings.pack else 1

    def _suffices(self) -> bool:
        return sum(self._worth(text) for text in self._kept()) >= self._wanted

    def _too_little(self) -> str:
        kept = self._kept()
        fates = Counter(self.dropped.values())
        fates.update(text.dropped for text in self.texts if text.dropped)
        fates["perplexity"] = sum(text.dropped is None for text in self.texts) - len(kept)
        why = ", ".join(f"{number} {reason}" for reason, number in fates.most_common() if number) or "none"
        unit = "tokens" if self.settings.pack else "texts"
        commonest = fates.most_common(1)[0][0] if fates else ""
        remedy = REMEDIES.get(commonest, "a smaller calib.generated_count")
        few = ""
        if len(self.order) < self.limit:
            few = f" (its corpus for prefixes, {self.settings.base}, has no more documents)"
        return (
            f"calib.generated_count={self.count}: the model began {len(self.order)} texts{few}, calib.tries="
            f"{self.settings.tries} a sequence, and {sum(self._worth(text) for text in kept)} of the {self._wanted} "
            f"{unit} needed were kept. Dropped: {why}. Try {remedy}, or raise calib.tries."
        )


def _repeats(tokens: list[int]) -> float:
    """Return the fraction of a text's 4-grams that have been in it before."""
    grams = [tuple(tokens[start : start + 4]) for start in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _language(text: str) -> str:
    import py3langid

    language, _ = py3langid.classify(text)
    assert isinstance(language, str)
    return language


def _check_languages(key: str, languages: list[str] | None) -> None:
    if languages is None:
        return
    import py3langid

    known = sorted(language for language, _ in py3langid.rank(""))
    wrong = [item for item in languages if item not in known]
    if wrong or not languages:
        raise ConfigError(
            f"{key}={languages}: must be a list of languages, such as [en], or null for no filter. Known: "
            f"{', '.join(known)}."
        )


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _damage(key: str, folder: Path) -> str | None:
    """Say what is wrong with texts in the cache, None if nothing."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["key"] != key:
            return f"{MANIFEST} is of other settings"
        if hashlib.sha256((folder / TEXTS).read_bytes()).hexdigest() != manifest["texts_sha256"]:
            return f"{TEXTS} does not have the SHA-256 it was stored with"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__} while reading it"
    return None
