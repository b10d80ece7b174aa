"""Errors that a user can act on: each message says what was set, which rule it breaks, and what to change."""


class RepruneError(Exception):
    """A failure with a message meant for the user; shown without a traceback."""


class ConfigError(RepruneError):
    """Settings that are unknown, out of range or contradict each other; raised before weights are loaded."""


class AssetError(RepruneError):
    """A downloaded file is missing, cut off or not the one that was pinned."""


class CorpusError(RepruneError):
    """Text that cannot be read, or too little of it for the draw that was asked for."""


class ModelError(RepruneError):
    """A model that cannot be loaded, or whose blocks this package cannot prune."""


class NumericalError(RepruneError):
    """A computation whose result would be meaningless: a non-finite value or a factorisation that fails."""
