"""Tests that need packages which `make dev` does not install.

Such a test is marked `slow`, and `make test-slow` installs the packages first. A test that is skipped for want of a
package says so by this helper and by nothing else; tests/tidy/test_targets.py checks it, so that no test is skipped in
every target.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

EXTRAS = {  # extras of pyproject.toml that targets install for tests, and the packages that tests import by them
    "alfworld": ("alfworld", "textworld", "fast_downward"),
    "trackers": ("tensorboard", "wandb", "mlflow"),
    "relay-tests": ("obstore", "moto", "mooncake"),
    "deploy-tests": ("kubernetes_validate",),
}


def marks(extra: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a test, or of a module, that needs this extra."""
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    reason = f"{', '.join(missing)} is not installed: pip install 'rose-rl[{extra}]'"
    return [pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=reason)]


def needs(extra: str) -> Callable[[Any], Any]:
    """Return a decorator for a test that needs this extra."""

    def marked(test: Any) -> Any:
        for mark in marks(extra):
            test = mark(test)
        return test

    return marked
