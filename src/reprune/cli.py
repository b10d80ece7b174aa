"""What stands between a command line and the program: the schema, options by name, and errors as one clear message."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from reprune.config import RunConfig, near
from reprune.errors import ConfigError, RepruneError

ConfigStore.instance().store(name="schema", node=RunConfig)
USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130  # exit codes


def load_option(group: str, name: str) -> DictConfig:
    """Compose one option of a config group by itself, as `heldout=[wiki]` needs conf/calib/wiki.yaml.

    Raises:
        ConfigError: there is no such option; lists those there are.
    """
    try:
        return compose(config_name=f"{group}/{name}")[group]  # an option of a group lies under the group's name
    except MissingConfigException as error:
        options = _options(group)
        raise ConfigError(
            f"{name}: not a corpus.{near(name, options)} Options of {group}: {', '.join(options)}."
        ) from error


def guard(main: Callable[[], None], conf: Path) -> None:
    """Run a Hydra entry point; show failures that a user can mend without a traceback, and set the exit code.

    Args:
        main: decorated with hydra.main.
        conf: the folder with the configs, to find the names that a mistyped one may have meant.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then hands errors on, where it would print and exit
    try:
        main()
    except ConfigError as error:
        _fail(str(error), USAGE_ERROR)
    except RepruneError as error:
        _fail(str(error), FAILURE)
    except (HydraException, OmegaConfBaseException) as error:
        with initialize_config_dir(str(conf), version_base="1.3"):
            _fail(_explain(error), USAGE_ERROR)
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}. Give another folder with hydra.run.dir=...", FAILURE)
    except KeyboardInterrupt:
        _fail("Interrupted.", INTERRUPTED)


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"\n{message}\n")
    sys.exit(code)


def _explain(error: Exception) -> str:
    """Shorten what Hydra says of a bad override and add the closest names that exist."""
    text, cause = str(error), str(error.__cause__ or "")
    if match := re.search(r"Could not (?:find|load) '(\w+)/([^'\s]+)'", text):
        group, name = match.groups()
        options = _options(group)
        return f"{group}={name}: no such option.{near(name, options)} Options of {group}: {', '.join(options)}."
    if match := re.search(r"Could not override '([^']+)'", text):
        key = match.group(1)
        parent, _, word = key.rpartition(".")
        known = _keys(parent)
        if known and word not in known:
            return f"{key}: no such setting.{near(word, known)} Keys of {parent or 'the config'}: {', '.join(known)}."
    if match := re.search(r"Error merging override (.+)", text):
        return f"{match.group(1)}: {cause.splitlines()[0]}."
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: cannot be read ({text.splitlines()[0]}). Quote what the shell or Hydra may take apart."
        )
    return "\n".join(line for part in (text, cause) for line in part.splitlines()[:1])


def _options(group: str) -> list[str]:
    """List the options of a config group."""
    return GlobalHydra.instance().config_loader().get_group_options(group, ObjectType.CONFIG)


def _keys(parent: str) -> list[str]:
    """List the keys under a dotted name of the default config."""
    node = compose(config_name="config")
    found = OmegaConf.select(node, parent) if parent else node
    return [str(key) for key in found if key != "_target_"] if isinstance(found, DictConfig) else []
