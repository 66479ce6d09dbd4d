"""Things that are named with a few numbers in one word: `gamma:rate=2,cv=4`, `lognormal:median=0.2,sigma=1`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping

from rose.errors import ConfigError


def read_settings(kind: str, name: str, spec: str, known: Mapping[str, float], example: str) -> dict[str, float]:
    """The settings of `name`, a `kind` of thing: those in `spec` over those known. One that is NaN must be given.

    Raises ConfigError, which names the nearest setting there is and how it is written.
    """
    settings = dict(known)
    for part in filter(None, spec.partition(":")[2].split(",")):
        key, _, text = part.partition("=")
        if key not in settings:
            near = difflib.get_close_matches(key, settings, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(settings)}, as in {example}"
            raise ConfigError(f"{kind} `{name}` has no setting `{key}`", hint=hint)
        settings[key] = _positive(spec, key, text)
    missing = [key for key, value in settings.items() if math.isnan(value)]
    if missing:
        raise ConfigError(f"{kind} `{name}` needs {' and '.join(missing)}", hint=f"write it like {example}")
    return settings


def _positive(spec: str, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"`{key}` in `{spec}` is not a number above 0: `{text}`")
    return value
