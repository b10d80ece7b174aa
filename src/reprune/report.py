"""report.html: one run on one self-contained page, made from the files of its run directory.

As a command it sets runs side by side: see reprune.study.
"""

import base64
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from reprune.rundir import RunDir


def write(rundir: RunDir, metrics: dict[str, float]) -> None:
    """Write report.html from a run directory's files.

    Args:
        rundir: holds config.resolved.yaml, environment.json, calib.json, blocks.jsonl and plots/.
        metrics: the final numbers, which metrics.json will hold.
    """
    environment = Environment(loader=PackageLoader("reprune"), autoescape=True, undefined=StrictUndefined)
    pictures = [
        (path.stem.replace("_", " "), base64.b64encode(path.read_bytes()).decode())
        for path in sorted((rundir.path / "plots").glob("*.png"))
    ]
    manifests = rundir.read_json("calib.json")
    page = environment.get_template("report.html.jinja").render(
        config=rundir.read_config(),
        environment=rundir.read_json("environment.json"),
        draws=_draws(manifests),
        generated=[part["generated"] for part in manifests["calib"] if "generated" in part],
        blocks=rundir.read_blocks(),
        metrics=metrics,
        corpora=[key.partition("/")[2] for key in metrics if key.startswith("kl/")],
        scores=_scores(metrics),
        pictures=pictures,
    )
    rundir.write_text("report.html", page)


def _scores(metrics: dict[str, float]) -> list[dict[str, Any]]:
    """List the other scores: those of the pruned model that the dense one has too, beside windows of corpora."""
    rows = []
    for key, value in metrics.items():
        kind, _, what = key.partition("/")
        dense = metrics.get(f"{kind}_dense/{what}")
        if dense is None or f"kl/{what}" in metrics or kind == "tokens":
            continue
        spread = metrics.get(f"{kind}_stderr/{what}")
        rows.append({
            "what": what, "metric": kind, "dense": dense, "pruned": value, "stderr": spread,
            "p": metrics.get(f"{kind}_p/{what}"),
        })  # fmt: skip
    return rows


def _draws(manifests: dict[str, Any]) -> list[dict[str, Any]]:
    """List every draw of calib.json with what it was used for."""
    rows = [{**part, "use": f"calibration: {', '.join(part['use'])}"} for part in manifests["calib"]]
    rows += [{"use": "held out", **drawn} for drawn in manifests["heldout"].values()]
    return rows + [{"use": key, **drawn} for key, items in manifests["eval"].items() for drawn in items.values()]


if __name__ == "__main__":
    from reprune.study import main

    main()
