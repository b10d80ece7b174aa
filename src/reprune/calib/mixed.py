"""A mix of corpora by weight; each may serve for the masks, for reconstruction, or for both."""

import math
from dataclasses import dataclass
from typing import Any

from reprune.errors import ConfigError
from reprune.parts import Part, Use, checked_use, shares


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """Settings; each is explained in conf/calib/mixed.yaml."""

    sources: Any  # list of {corpus, weight, use}, as reprune.config makes it of what a user writes
    weight: float
    use: list[Use]

    def __post_init__(self) -> None:
        if len(self.sources) < 1:
            raise ConfigError("sources=[]: a mix needs a corpus. Name some, as in calib.sources=[sotu,wiki].")
        checked_use("use", self.use)
        for source in self.sources:
            weight = self._weight(source)
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not number or not 0 < weight < math.inf:
                raise ConfigError(
                    f"calib.sources: {source['corpus']} has weight {weight}; must be a number above 0. To leave a "
                    f"corpus out, leave out its name."
                )
            self._use(source)

    def parts(self, name: str, count: int) -> list[Part]:
        """Share out calib.count sequences over the sources.

        Args:
            name: of the mix; none of its sequences goes by it.
            count: to share out.

        Raises:
            ConfigError: a source would get none.
        """
        given = shares(count, [self._weight(source) for source in self.sources])
        for source, share in zip(self.sources, given, strict=True):
            if share < 1:
                raise ConfigError(
                    f"calib.count={count}: {source['corpus']} with weight {self._weight(source):g} gets none of them. "
                    f"Raise calib.count or its weight, or leave it out of calib.sources."
                )
        return [
            Part(source["corpus"], share, self._use(source)) for source, share in zip(self.sources, given, strict=True)
        ]

    def _weight(self, source: dict[str, Any]) -> Any:
        return source.get("weight", self.weight)

    def _use(self, source: dict[str, Any]) -> frozenset[Use]:
        given = source.get("use")
        if given is None:
            return frozenset(self.use)
        key = f"calib.sources: use of {source['corpus']}"
        try:
            return checked_use(key, [Use(item) for item in given])
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{key} is {given}; must be a list of mask and recon, such as [recon].") from error
