"""Removes what must not be published from the texts of a report: secrets, the host, the user and private folders.

A report is made to be attached to a public issue. Secrets are recognised by their value (those in this process's
environment) and by their form (tokens of common services, keys in headers and addresses). Hosts, users and folders
are kept only if the owner asks with `--with-names`; secrets never are.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from rose.private_files import is_secret
from rose.verify.kit_results import KitSettings, StepResult

SECRET_CHARACTERS_MIN = 6  # shorter values occur in ordinary text
NAME_CHARACTERS_MIN = 3
SECRET_VARIABLE = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL)", re.IGNORECASE)
SECRET_FORMS = (
    re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA)[A-Za-z0-9_\-]{8,}"),
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=\-]{6,}"),
    re.compile(r"(?i)(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),  # user and password in an address
    re.compile(r"(?i)(?<=--api-key[ =])\S+"),
)
HOME = re.compile(r"/(?:home|Users)/[^/\s:'\"]+")
GPU_SERIAL = re.compile(r"\bGPU-[0-9a-f]{8}-[0-9a-f-]{20,}\b")


class Redactor:
    """Replaces private parts of texts by what they stand for: <token>, <host>, <user>, ~, <folder>."""

    def __init__(self, *folders: Path, with_names: bool = False, environment: Mapping[str, str] | None = None) -> None:
        """Know the secrets of an environment, and unless `with_names` this host, this user and these folders."""
        variables = os.environ if environment is None else environment
        self._with_names = with_names
        secrets = [
            value
            for name, value in variables.items()
            if (is_secret(name) or SECRET_VARIABLE.search(name)) and len(value) >= SECRET_CHARACTERS_MIN
        ]
        self._secrets = sorted(secrets, key=len, reverse=True)
        self._words = {} if with_names else _private_words(folders)

    def text(self, text: str) -> str:
        """Return the text without private parts."""
        for secret in self._secrets:
            text = text.replace(secret, "<token>")
        for form in SECRET_FORMS:
            text = form.sub("<token>", text)
        if self._with_names:
            return text
        for word, replacement in self._words.items():
            is_path = word.startswith("/")
            pattern = re.escape(word) if is_path else rf"(?<![\w-]){re.escape(word)}(?![\w-])"
            text = re.sub(pattern, replacement, text)
        return GPU_SERIAL.sub("GPU-<serial>", HOME.sub("~", text))

    def result(self, result: StepResult) -> StepResult:
        """Return a step's result whose texts have no private parts. Names of steps, checks and figures are ours."""
        return msgspec.structs.replace(
            result,
            reason=self.text(result.reason),
            checks=tuple(msgspec.structs.replace(check, seen=self.text(check.seen)) for check in result.checks),
            facts={name: self.text(value) for name, value in result.facts.items()},
            notes=tuple(map(self.text, result.notes)),
        )

    def settings(self, settings: KitSettings) -> KitSettings:
        """Return the settings as a report may show them."""
        texts = {name: self.text(getattr(settings, name)) for name in ("serving", "rollout", "vllm_python")}
        return msgspec.structs.replace(settings, **texts)


def _private_words(folders: tuple[Path, ...]) -> dict[str, str]:
    """Return what stands for each private word; longer ones come first, since they may contain others."""
    words = {str(path): "<folder>" for folder in folders for path in (folder.absolute(), folder.resolve())}
    words |= {str(Path(tempfile.gettempdir())) + "/": "<tmp>/"}
    home = Path.home()
    if home != Path("/"):
        words[str(home)] = "~"
    host = socket.gethostname()
    words |= dict.fromkeys((host, host.partition(".")[0]), "<host>")
    with suppress(KeyError, OSError):
        user = getpass.getuser()
        if user not in ("root", "user"):  # words of any log
            words[user] = "<user>"
    return {
        word: words[word]
        for word in sorted(words, key=len, reverse=True)
        if len(word) >= NAME_CHARACTERS_MIN and word != "localhost"
    }
