"""Reads names with a few numbers in one text: `gamma:rate=2,cv=4`, `lognormal:median=0.2,sigma=1`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping

from rose.errors import ConfigError


def read_settings(kind: str, name: str, spec: str, known: Mapping[str, float], example: str) -> dict[str, float]:
    """Return the settings in `spec` over the known ones; a known one that is NaN has no default.

    Raises ConfigError, which names the nearest setting and how it is written.
    """
    settings = dict(known)
    for part in filter(None, spec.partition(":")[2].split(",")):
        key, _, text = part.partition("=")
        if key not in settings:
            near = difflib.get_close_matches(key, settings, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(settings)}, as in {example}"
            raise ConfigError(f"{kind} `{name}` has no setting `{key}`", hint=hint)
        try:
            settings[key] = float(text)
        except ValueError:
            settings[key] = math.nan
        if not 0 < settings[key] < math.inf:
            raise ConfigError(f"`{key}` in `{spec}` is not a number above 0: `{text}`")
    missing = [key for key, value in settings.items() if math.isnan(value)]
    if missing:
        raise ConfigError(f"{kind} `{name}` needs {' and '.join(missing)}", hint=f"write it like {example}")
    return settings


def nearest_example(name: str, examples: Mapping[str, str], otherwise: str) -> str:
    """Return a hint for an unknown name: the example of the nearest one, else `otherwise` and all examples."""
    near = difflib.get_close_matches(name, examples, n=1)
    return f"did you mean `{examples[near[0]]}`?" if near else f"{otherwise} {', '.join(examples.values())}"
