"""One command is one run: `python run.py pruner=sparsegpt recon=gp`; `-m` makes it a sweep. Settings live in conf/."""

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from reprune import cli
from reprune.config import build_plan


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    """Check the config, then run it into Hydra's output directory."""
    plan = build_plan(config, cli.load_option)
    from reprune.pipeline import run  # imports torch, which asking for help does not need

    run(plan, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    cli.guard(main, Path(__file__).resolve().parent / "conf")
