"""`rose completion`: a script of the shell that knows every command and its options."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from rose.cli.main import COMMANDS, main


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_knows_every_command_and_the_shell_can_read_it(shell, capsys, tmp_path):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS) and "--dry-run" in script and "limits" in script
    if found := shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([found, "-n", tmp_path / "script"], check=True, timeout=60)


def test_bash_completes_a_command_and_its_actions(capsys, tmp_path):
    main(["completion", "bash"])
    (tmp_path / "script").write_text(capsys.readouterr().out)
    typed = (
        "source ./script; COMP_WORDS=(rose lend pa); COMP_CWORD=2; "
        "complete -p rose | grep -oE -- '-F [^ ]+' | (read -r _ name; $name rose pa lend; echo \"${COMPREPLY[@]}\")"
    )
    shown = subprocess.run(["bash", "-c", typed], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert shown.stdout.split() == ["pause"], shown.stderr


def test_without_shtab_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'rose-rl[completion]'" in capsys.readouterr().err
