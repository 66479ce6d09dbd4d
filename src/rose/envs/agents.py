"""An agent by its name, as settings have it: `module:function`, or `file.py:function`.

A module is looked for where Python looks and in the folder that ROSE was started in; a file by its path. Whatever is
wrong with it is told before anything is started.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from rose.envs.openai_agent import CLIENT, CLIENT_HINT, Agent
from rose.errors import ConfigError

FORM = "say it as module:function or file.py:function, as in agent=my_agent.py:play"


def check_agent(name: str) -> None:
    """That it is there, and what it needs too. Raises ConfigError."""
    find_agent(name)
    if importlib.util.find_spec(CLIENT) is None:
        raise ConfigError(f"agent {name} needs the package {CLIENT}, whose client it is given", hint=CLIENT_HINT)


def find_agent(name: str) -> Agent:
    """Imports it. Raises ConfigError."""
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ConfigError(f"agent {name!r} names no function", hint=FORM)
    module = _module(place)
    found: Agent | None = getattr(module, function, None)
    if found is None:
        near = difflib.get_close_matches(function, vars(module), n=1)
        raise ConfigError(f"there is no {function} in {place}", hint=f"did you mean {near[0]}?" if near else FORM)
    if not callable(found):
        raise ConfigError(f"{name} is no function", hint="an agent is a function of a client and a task")
    return found


def lasting_name(name: str) -> str:
    """The same from whatever folder it is looked for: files by their whole path."""
    place, _, function = name.rpartition(":")
    return f"{Path(place).resolve()}:{function}" if place.endswith(".py") else name


def _module(place: str) -> ModuleType:
    try:
        return _from_file(Path(place)) if place.endswith(".py") else _by_name(place)
    except ConfigError:
        raise
    except Exception as error:  # it is somebody's code, and may do anything
        what = f"agent {place} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(what, hint=f"see that `python -c 'import {place}'` works where you start ROSE") from error


def _by_name(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {path} to take an agent from", hint=FORM)
    name = f"rose_agent_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look for it there
    spec.loader.exec_module(module)
    return module
