"""Shows what a run would be calibrated on, without pruning anything: `python -m reprune.calib calib=selfgen seed=1`.

Takes the overrides of run.py. Text that the model is to write is written, and found in the cache by the run.
"""

import logging
import statistics
import sys
from collections import Counter
from pathlib import Path

from hydra import compose, initialize_config_dir

from reprune import cli
from reprune.config import build_plan
from reprune.errors import ConfigError

SAMPLES, SHOWN = 3, 600  # decoded sequences, and characters of each


def main() -> None:
    """Compose the config that the command line gives, draw, and print."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    if not (CONF / "config.yaml").is_file():
        raise ConfigError(f"{CONF}: there is no config.yaml. Start this from a checkout of the repository.")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", overrides=["run_name=calib", *sys.argv[1:]])
        plan = build_plan(config, cli.load_option)
    import py3langid

    from reprune.corpora import draw_texts
    from reprune.devices import pick_device
    from reprune.interfaces import Writer
    from reprune.model.pretrained import use_bos
    from reprune.terminal import log

    log.setLevel(logging.INFO)
    log.handlers = [logging.StreamHandler(sys.stdout)]
    plan.check_length()
    model, tokenizer = plan.model.load()
    bos = use_bos(plan.model.bos, tokenizer)
    texts = draw_texts(plan, Writer(model, tokenizer, bos, pick_device(plan.model.device), plan.seed))

    print(f"calib={plan.calib}, {plan.model.describe()}, seed {plan.seed}, draw {plan.draw}\n")
    print("rows      corpus      use          documents          tokens of a document   languages")
    first = 0
    for part, drawn in texts.calib:
        lengths = [piece.end - piece.start for sequence in drawn.pieces for piece in sequence]
        languages = Counter(py3langid.classify(text)[0] for text in drawn.texts.values())
        spoken = ", ".join(f"{language} {number}" for language, number in languages.most_common(4))
        use = " ".join(sorted(use.value for use in part.use))
        documents = f"{len(drawn.documents)} of {drawn.documents_available}"
        length = f"{min(lengths)} to {max(lengths)}, median {statistics.median(lengths):g}"
        rows = f"{first}-{first + part.count - 1}"
        print(f"{rows:<9} {part.corpus:<11} {use:<12} {documents:<18} {length:<22} {spoken}")
        first += part.count
    for told in texts.generated.values():
        dropped = ", ".join(f"{why} {number}" for why, number in told["dropped"].items()) or "none"
        print(f"\ngenerated: {told['texts']} texts with {told['tokens']} tokens from {told['candidates']} starts")
        print(f"dropped:   {dropped}")
    for note in texts.notes():
        print(f"\nNote: {note}")
    calib = texts.streams["calib"]
    for row in sorted({0, len(calib) // 2, len(calib) - 1})[:SAMPLES]:
        shown = tokenizer.decode(calib[row])
        print(f"\n--- row {row}, {calib.shape[1]} tokens, the first {SHOWN} characters ---\n{shown[:SHOWN]}")


CONF = Path(__file__).resolve().parents[3] / "conf"
if __name__ == "__main__":
    cli.guard(main, CONF)
