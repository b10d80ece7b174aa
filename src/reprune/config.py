"""From what a user typed to a checked plan: typed root, `build` for the groups, and the checks between groups.

Nothing here imports torch, so that composing a config and asking for help stay fast. Method classes are imported by
`build`, by the dotted name in their YAML.
"""

import difflib
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from reprune.errors import ConfigError
from reprune.parts import Part, Use, in_rows, rows

STREAM_DTYPES = ("float32", "bfloat16")
DRAW_KEYS = ("count", "seq_len", "heldout_count", "draw")  # of calib, beside the corpus' own keys
SOURCE_KEYS = ("corpus", "weight", "use")  # of a source of calib=mixed
ALONE_KEYS = ("generated_count", "mode", "use")  # of a corpus that is all of calib; in a mix its source says it
NAME = "name"  # of a corpus: in its YAML, beside the settings of its class, which other corpora may share


@dataclass
class RunConfig:
    """The keys of conf/config.yaml; each is explained there."""

    model: Any = MISSING
    calib: Any = MISSING
    heldout: Any = MISSING
    sparsity: Any = MISSING
    pruner: Any = MISSING
    recon: Any = MISSING
    eval: Any = field(default_factory=dict)
    seed: int = MISSING
    batch_size: int = MISSING
    stream_device: str = MISSING
    stream_dtype: str = MISSING
    dry_run: bool = MISSING
    study: str = MISSING
    run_name: str = MISSING


@dataclass(frozen=True)
class Plan:
    """Every built part of a run, and the config they came from with nothing left to look up.

    Attributes:
        model, allocation, pruner, recon: the built group options.
        corpora: name -> corpus, those of calib, heldout and eval; one object a name.
        calib: name of the calibration option.
        parts: what calibration is made of, in the order of the stream's rows.
        heldout: names of the corpora whose held-out split is measured.
        count: calib.count, the sequences that were asked for; generated ones may come on top.
        seq_len, heldout_count: tokens in a sequence, and sequences a held-out corpus.
        draw: index of the draw; no two share a document.
        evals: name -> built evaluation.
        resolved: the whole config, enough to run again.
    """

    model: Any
    corpora: dict[str, Any]
    calib: str
    parts: list[Part]
    heldout: list[str]
    count: int
    seq_len: int
    heldout_count: int
    draw: int
    allocation: Any
    pruner: Any
    recon: Any
    evals: dict[str, Any]
    seed: int
    batch_size: int
    stream_device: str
    stream_dtype: str
    dry_run: bool
    study: str
    run_name: str
    resolved: dict[str, Any]

    @property
    def mask_rows(self) -> slice:
        """Rows of the calibration stream that the pruner's statistics see."""
        return rows(self.parts, Use.mask)

    @property
    def recon_rows(self) -> slice:
        """Rows of the calibration stream that reconstruction learns from."""
        return rows(self.parts, Use.recon)

    def check(self) -> None:
        """Check what no group can see alone.

        Raises:
            ConfigError: lists every contradiction found, one a line.
        """
        problems = [problem for problem in self._problems() if problem]
        if problems:
            raise ConfigError("\n".join(problems))

    def check_length(self) -> None:
        """Check sequence lengths against the model's positions; may read the model's config, but no weights.

        Raises:
            ConfigError: a sequence is longer than the model's positions.
        """
        limit = self.model.max_positions()
        lengths = {"calib.seq_len": self.seq_len}
        lengths |= {
            f"{'calib' if name == self.calib else name}.max_length": item.max_length
            for name, item in self.corpora.items()
            if hasattr(item, "max_length")
        }
        lengths |= {
            f"eval.{name}.seq_len": item.seq_len for name, item in self.evals.items() if hasattr(item, "seq_len")
        }
        problems = [
            f"{key}={length}: {self.model.describe()} has {limit} positions. Set {key} to at most {limit}."
            for key, length in lengths.items()
            if limit is not None and length > limit
        ]
        if problems:
            raise ConfigError("\n".join(problems))

    def _problems(self) -> list[str | None]:
        recon = self.recon
        choose, learn = (chosen.stop - chosen.start for chosen in (self.mask_rows, self.recon_rows))
        generated = [part.corpus for part in self.parts if hasattr(self.corpora[part.corpus], "write")]
        return [
            _at_least("calib.count", self.count, 1, "a statistic needs a sequence to come from"),
            _at_least("calib.seq_len", self.seq_len, 2, "a sequence of one token has nothing to attend to"),
            _at_least("calib.heldout_count", self.heldout_count, 1, "use heldout=[] to measure no held-out corpus"),
            _at_least("calib.draw", self.draw, 0, "draws are counted from 0"),
            _at_least("batch_size", self.batch_size, 1, "a forward pass needs a sequence"),
            f"recon.batch_size={recon.batch_size}: reconstruction has only {learn} sequences. Lower it, or raise "
            "calib.count."
            if recon.trains and recon.batch_size > learn >= 1
            else None,
            f"calib={self.calib}: {type(self.pruner).__name__} has no sequence to choose masks by. Add mask to a use."
            if choose == 0 < self.count and self.pruner.statistic is not None
            else None,
            f"calib={self.calib}: no sequence is for reconstruction. Add recon to a use, or set recon=none."
            if learn == 0 < self.count and recon.changes
            else None,
            *(
                f"calib={self.calib}: nothing would see the text of {part.corpus}, whose use is "
                f"[{', '.join(use.value for use in part.use)}], with {type(self.pruner).__name__} and "
                f"recon.solver={recon.solver.value}. Set its use to [mask,recon], or leave it out."
                for part in self.parts
                if not (Use.mask in part.use and self.pruner.statistic is not None)
                and not (Use.recon in part.use and recon.changes)
                and not (Use.mask in part.use and Use.recon in part.use)
            ),
            f"calib.sources: {generated[0]} is named twice; one text is written a run. Name it once, with both uses."
            if len(set(generated)) != len(generated)
            else None,
            "recon.keep_best=heldout with heldout=[]: there is no held-out error to go by. Name a corpus in heldout, "
            "or use recon.keep_best=calib."
            if recon.keep_best.value == "heldout" and not self.heldout
            else None,
            f"stream_dtype={self.stream_dtype}: must be float32 or bfloat16."
            if self.stream_dtype not in STREAM_DTYPES
            else None,
            getattr(self.pruner, "problem", lambda _: None)(self.allocation.resolved_pattern()),
        ]


def _at_least(key: str, value: int, least: int, why: str) -> str | None:
    return f"{key}={value}: must be at least {least}; {why}." if value < least else None


def build_plan(config: DictConfig, load_option: Callable[[str, str], DictConfig]) -> Plan:
    """Build every part that a composed config names, and check them against each other.

    Args:
        config: the composed config, as conf/config.yaml and the command line give it.
        load_option: (group, option) -> that option's own YAML, for corpora that heldout and eval name.

    Raises:
        ConfigError: a setting is unknown, missing, of the wrong type, out of range, or contradicts another.
    """
    _reject_nan(config)
    calib_node: Any = OmegaConf.to_container(config.calib, resolve=True)  # a missing value stays for build to name
    draw = {key: _whole(f"calib.{key}", calib_node.pop(key, None)) for key in DRAW_KEYS}
    calib_name = _name(calib_node, "calib")
    nodes: dict[str, Any] = {calib_name: calib_node}

    def made_of(name: str, node: Any) -> None:
        """Remember the corpora that a corpus is made of, and leave their names in its node."""
        if isinstance(node.get("base"), str | Mapping):
            if name == (node["base"] if isinstance(node["base"], str) else next(iter(node["base"]), None)):
                raise ConfigError(f"{name}.base={name}: must be another corpus, such as sotu.")
            node["base"] = named(f"{name}.base", [node["base"]])[0]
        if isinstance(node.get("sources"), list):
            node["sources"] = [source(item) for item in node["sources"]]

    def source(item: Any) -> dict[str, Any]:
        """Read one source of a mix: a corpus, or {corpus: ..., weight: ..., use: ...}."""
        mix = dict(item) if isinstance(item, Mapping) and "corpus" in item else {"corpus": item}
        for key in mix:
            if key not in SOURCE_KEYS:
                raise ConfigError(f"calib.sources: {key}: no such setting. {_keys('a source', list(SOURCE_KEYS))}")
        corpus = mix["corpus"]
        own = next(iter(corpus.values())) if isinstance(corpus, Mapping) and corpus else {}
        for key in ALONE_KEYS:
            if key in (own or {}) and "_target_" not in own:
                raise ConfigError(f"calib.sources: {key} has no meaning in a mix; set weight and use beside corpus.")
        return {**mix, "corpus": named("calib.sources", [corpus])[0]}

    def named(key: str, items: Any) -> list[str]:
        """Remember the corpora that a list names, and return their names."""
        if isinstance(items, str) or not isinstance(items, list | ListConfig):
            raise ConfigError(f"{key}={items}: must be a list of corpora, such as {key}=[sotu,wiki] or {key}=[].")
        names = []
        for item in items:
            name, settings = next(iter(item.items())) if isinstance(item, Mapping) else (item, {})
            if not isinstance(name, str):
                raise ConfigError(f"{key}: {item} is not the name of a corpus.")
            if name not in nodes or settings:
                whole = "_target_" in settings
                option = {NAME: name, **settings} if whole else OmegaConf.merge(load_option("calib", name), settings)
                name = _name(option, f"{key}: {name}")
                node: Any = OmegaConf.to_container(OmegaConf.create(option), resolve=True)
                made_of(name, node)
                if nodes.get(name, node) != node:
                    raise ConfigError(
                        f"{key}: corpus {name} is set in two ways. Give one of them another name, as in "
                        f"{key}=[{{{name}: {{{NAME}: other, ...}}}}]."
                    )
                nodes[name] = node
            names.append(name)
        if len(set(names)) != len(names):
            raise ConfigError(f"{key}={list(items)}: a corpus is named twice.")
        return names

    made_of(calib_name, calib_node)
    heldout = named("heldout", config.heldout)
    evals = {}
    eval_nodes = {name: dict(node) for name, node in config.eval.items()}
    for name, node in eval_nodes.items():
        if "corpora" in node:
            node["corpora"] = named(f"eval.{name}.corpora", node["corpora"])
        evals[name] = build(node, f"eval.{name}")
    parts = {group: build(config[group], group) for group in ("model", "sparsity", "pruner", "recon")}
    corpora = {
        name: build(
            {key: value for key, value in node.items() if key != NAME},
            "calib" if name == calib_name else f"heldout.{name}",
        )
        for name, node in nodes.items()
    }
    calib = corpora[calib_name]
    parts_of = getattr(calib, "parts", lambda name, count: [Part(name, count, frozenset(Use))])
    sequences = in_rows(parts_of(calib_name, draw["count"]))
    bases = [item.base for item in corpora.values() if hasattr(item, "base")]
    tested = [name for item in evals.values() for name in getattr(item, "corpora", [])]
    for name in [*heldout, *tested, *bases, *(part.corpus for part in sequences)]:
        if not hasattr(corpora[name], "pack"):
            raise ConfigError(f"{name}: is a mix and no corpus; name what it is made of, one by one.")

    def expanded(name: str) -> Any:
        """Write a corpus with all its settings, so that it can be read as a list names it."""
        node = OmegaConf.to_container(OmegaConf.create(nodes[name]), resolve=True)
        assert isinstance(node, dict)
        if isinstance(node.get("base"), str):
            node["base"] = expanded(node["base"])
        return {name: node} if name != calib_name else name

    resolved: Any = OmegaConf.to_container(config, resolve=True)
    resolved["heldout"] = [expanded(name) for name in heldout]
    if isinstance(calib_node.get("base"), str):
        resolved["calib"]["base"] = expanded(calib_node["base"])
    if isinstance(calib_node.get("sources"), list):
        resolved["calib"]["sources"] = [{**item, "corpus": expanded(item["corpus"])} for item in calib_node["sources"]]
    for name, node in eval_nodes.items():
        if "corpora" in node:
            resolved["eval"][name]["corpora"] = [expanded(corpus) for corpus in node["corpora"]]
    plan = Plan(
        model=parts["model"],
        corpora=corpora,
        calib=calib_name,
        parts=sequences,
        heldout=heldout,
        allocation=parts["sparsity"],
        pruner=parts["pruner"],
        recon=parts["recon"],
        evals=evals,
        resolved=resolved,
        count=draw["count"],
        seq_len=draw["seq_len"],
        heldout_count=draw["heldout_count"],
        draw=draw["draw"],
        seed=config.seed,
        batch_size=config.batch_size,
        stream_device=config.stream_device,
        stream_dtype=config.stream_dtype,
        dry_run=config.dry_run,
        study=config.study,
        run_name=config.run_name,
    )
    plan.check()
    return plan


def build(node: Any, group: str) -> Any:
    """Turn one group's YAML into the frozen dataclass that its `_target_` names; the dataclass is the schema.

    Raises:
        ConfigError: a key is unknown, missing or of the wrong type, or its value is out of range.
    """
    node = OmegaConf.create(node) if not isinstance(node, DictConfig) else node
    target = str(node.get("_target_"))
    if not target.startswith("reprune."):
        raise ConfigError(f"{group}._target_={target}: must name a class of this package.")
    module, _, name = target.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{group}._target_={target}: there is no such class.") from error
    known = [item.name for item in fields(cls)]
    for key in node:
        if key != "_target_" and key not in known:
            raise ConfigError(f"{group}.{key}: no such setting.{near(str(key), known)} {_keys(group, known)}")
    missing = [key for key in known if key not in node or OmegaConf.is_missing(node, key)]
    if missing:
        raise ConfigError(f"{group}.{missing[0]}: must be set, as in {group}.{missing[0]}=... {_keys(group, known)}")
    given = OmegaConf.to_container(node, resolve=True)
    assert isinstance(given, dict)
    del given["_target_"]
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), given))
    except ConfigError as error:
        # A corpus calls a setting by its own name: it may stand in calib or in heldout.
        own = str(error).partition("=")[0] in known
        raise ConfigError(f"{group}.{error}" if own else str(error)) from error
    except OmegaConfBaseException as error:
        key = f"{group}.{error.full_key}" if getattr(error, "full_key", None) else group
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}. {_keys(group, known)}") from error


def near(word: str, known: list[str]) -> str:
    """Return a sentence that suggests the closest known words, or nothing."""
    close = difflib.get_close_matches(word, known, n=2, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _keys(group: str, known: list[str]) -> str:
    return f"Keys of {group}: {', '.join(known) or 'none'}."


def _name(node: Any, key: str) -> str:
    """Return the name that a corpus goes by in the results."""
    name = node.get(NAME)
    if not isinstance(name, str) or not name or "/" in name:
        raise ConfigError(
            f"{key}.{NAME}={name}: must be text without a slash; the numbers of a corpus are named by it."
        )
    return name


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key}={value}: must be a whole number.")
    return value


def _reject_nan(node: Any, path: str = "") -> None:
    """Refuse a NaN anywhere: it passes every comparison that would have caught it."""
    if isinstance(node, DictConfig | ListConfig):
        keys: Any = node.keys() if isinstance(node, DictConfig) else range(len(node))
        for key in keys:
            if not OmegaConf.is_missing(node, key):
                _reject_nan(node[key], f"{path}.{key}" if path else str(key))
    elif isinstance(node, float) and math.isnan(node):
        raise ConfigError(f"{path}=nan: not a number.")
