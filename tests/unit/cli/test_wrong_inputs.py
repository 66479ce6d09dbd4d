"""Wrong command lines and their answers: a sentence about what is wrong, what to do next, an exit code, no traceback.

Exit code 2 is wrong input, 1 is a world that does not answer.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rose.cli.main import main

FILES = {
    "bad.yaml": "steps: 3\n  seed: 1\n",
    "twice.yaml": "steps: 1\nsteps: 2\n",
    "list.yaml": "- steps\n",
    "unknown.yaml": "stepz: 3\n",
    "text.txt": "no model\n",
    "torn.jsonl": '{"t": 1.0, "fact"\n{}\n',
    "prices.yaml": "gpu: cheap\n",
}
WRONG = [
    # the command itself
    ("rnu", 2, "there is no command `rnu`", "rose run"),
    ("xyzzy", 2, "there is no command `xyzzy`", "rose --help"),
    ("status", 2, "there is no command `status`", "rose lend status"),
    ("ps", 2, "there is no command `ps`", "rose runs ls"),
    ("help xyzzy", 2, "there is no command `xyzzy`", "rose --help"),
    # rose run
    ("run --steps 5", 2, "`rose run` has no option --steps", "--set steps=5"),
    ("run --steps=5", 2, "`rose run` has no option --steps", "--set steps=5"),
    ("run --learning-rate 0.1", 2, "`rose run` has no option --learning-rate", "--set train.learning_rate=0.1"),
    ("run --async", 2, "`rose run` has no option --async", "--asynchronous"),
    ("run --set steps = 5", 2, "takes no further argument `5`", "--set KEY=VALUE"),
    ("run missing.yaml", 2, "missing.yaml cannot be read", "path"),
    ("run --set steps=twenty", 2, "`steps` must be a whole number, not 'twenty'", "steps of learning"),
    ("run --set steps=0", 2, "between 1 and 1000000, not 0", "steps"),
    ("run --set train.lr=0.1", 2, "unknown setting `train.lr`", "train.learning_rate"),
    ("run --set nonsense", 2, "`nonsense` is not of the form key=value", "--set"),
    ("run bad.yaml", 2, "is not valid YAML (line 2)", ""),
    ("run twice.yaml", 2, "`steps` is written twice", ""),
    ("run list.yaml", 2, "the top level must be a group of settings", ""),
    ("run unknown.yaml", 2, "unknown setting `stepz`", "steps"),
    ("run one.yaml --settings other.yaml", 2, "two files of settings", "give one"),
    ("run --profile fast", 2, "there is no profile 'fast'", "default"),
    ("run --name a/b", 2, "`name` must be like first-try", ""),
    ("run --resume runs/none", 2, "no run", ""),
    ("run --set environment=chess", 2, "chess", "frozenlake"),
    ("run --set environment_options.turns=5", 2, "turns", "turns_max"),
    ("run --set train.loss.name=ppo", 2, "must be one of", "grpo"),
    ("run --set groups=8", 2, "must be a group of settings", "its keys are"),
    ("run --compare --set steps=6", 2, "by fours", "steps=8"),
    ("run --set agent=nope.py:play", 2, "nope.py", "agent"),
    ("run --set rollout_model=nowhere --dry-run", 2, "nowhere", "rose model new"),
    ("run --set tracking.tensorbord=true", 2, "unknown setting `tracking.tensorbord`", "tracking.tensorboard"),
    ("run --json", 2, "a run prints no JSON", "rose runs show --json"),
    ("run --on moon", 2, "--on cannot be `moon`", "rose run --help"),
    # rose serve, rose gateway
    ("serve --device cuda:0 --demo", 2, "`device` must be like cpu:0", "cores"),
    ("serve --device cpu:99 --demo", 2, "core 99", "cpu:"),
    ("serve --port abc --demo", 2, "--port must be a whole number, not `abc`", "rose serve --help"),
    ("serve --port 99999 --demo", 2, "99999", "port"),
    ("serve nowhere", 2, "nowhere", "model"),
    ("serve nowhere --prot 80", 2, "has no option --prot", "--port"),
    ("serve", 2, "there is nothing to serve", "rose serve MODEL"),
    ("gateway", 2, "`rose gateway` needs MODEL", "rose gateway --help"),
    ("gateway nowhere", 2, "nowhere", "model"),
    ("gateway nowhere --router best", 2, "--router cannot be `best`", ""),
    # rose lend
    ("lend", 2, "`rose lend` needs ACTION", "rose lend --help"),
    ("lend stop", 2, "`rose lend` has no action `stop`", ""),
    ("lend puase", 2, "`rose lend` has no action `puase`", "pause"),
    ("lend status", 2, "no lent device of yours runs on this machine", "rose serve"),
    ("lend status --url http://127.0.0.1:9", 2, "is no lent device of this user", "ROSE_OWNER_TOKEN"),
    ("lend limits", 2, "no limit was given", "--memory"),
    ("lend limits --memory 1.5", 2, "--memory 1.5 is not a share", "give 0 to 1"),
    ("lend limits --memory lots", 2, "--memory lots is not a share", "give 0 to 1"),
    ("lend vllm", 2, "which model should the rollouts run?", "--rollout-model"),
    ("lend vllm --mode sometimes", 2, "--mode cannot be `sometimes`", ""),
    # rose weights, rose relay
    ("weights ls", 2, "`rose weights ls` needs --relay, --run", ""),
    ("weights sh", 2, "`rose weights` has no action `sh`", "show"),
    ("weights ls --relay nowhere --run a", 2, "secret", ""),
    ("weights show --relay nowhere --run a newest", 2, "must be a whole number, not `newest`", ""),
    ("relay up --backend pigeon", 2, "--backend cannot be `pigeon`", ""),
    # rose load, rose plan, rose sim
    ("load", 2, "`rose load` needs TRACE_OR_GENERATOR, --url", ""),
    ("load gauss:rate=2 --url http://127.0.0.1:9", 2, "there is no generator `gauss`", "poisson"),
    ("load poisson:rate=2 --url http://127.0.0.1:9", 1, "http://127.0.0.1:9", "start"),
    ("load poisson:rate=2 --url http://127.0.0.1:9 --json no/folder.json", 2, "there is no folder no", ""),
    ("plan", 2, "no traffic is given", "--trace"),
    ("plan --rate 2 --hours 30", 2, "30 hours", "--hours"),
    ("plan --rate 2 --devices many", 2, "there is no device `many`", "h800"),
    ("sim --seeds a..b", 2, "`a..b` names no seeds", "0..99"),
    ("sim --minutes 99999", 2, "cannot be simulated", "1440"),
    # models, runs, journals, completion
    ("model new --preset big --out there", 2, "big", "qwen3-3m"),
    ("model show text.txt", 2, "text.txt", ""),
    ("runs show none", 2, "the folder runs cannot be read", "rose run"),
    ("runs compare one", 2, "one run has nothing to be compared with", "rose runs compare ONE OTHER"),
    ("play none", 2, "the folder runs cannot be read", "rose run"),
    ("journal show missing.jsonl", 2, "missing.jsonl", ""),
    ("journal show torn.jsonl", 1, "torn.jsonl", ""),
    ("settings play", 2, "cannot be `play`", ""),
    ("doctor --josn", 2, "`rose doctor` has no option --josn", "--json"),
    ("deploy k8s --values missing.yaml", 2, "missing.yaml cannot be read", ""),
    ("verify tpu", 2, "`tpu`", ""),
    ("verify gpu --device gpu7", 2, "`gpu7` is not a device", "cuda:0"),
    ("completion fish", 2, "SHELL cannot be `fish`", ""),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("ROSE_OWNER_TOKEN", "ROSE_RELAY_SECRET", "ROSE_RELAY_SECRET_FILE"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def test_there_are_sixty_and_more() -> None:
    assert len({words for words, *_ in WRONG}) == len(WRONG) >= 60


@pytest.mark.parametrize("words, code, what, hint", WRONG, ids=[words for words, *_ in WRONG])
def test_a_wrong_input_is_answered_with_a_sentence_and_a_next_step(words, code, what, hint, folder, capsys) -> None:
    try:
        found = main(words.split())
    except SystemExit as ended:  # from the parser
        found = ended.code
    shown = capsys.readouterr()
    assert found == code, shown.err
    sentence, step, *others = shown.err.splitlines()
    assert sentence.startswith("rose: ") and what in sentence
    assert step.startswith("  try: ") and hint in step and others == []
    assert "Traceback" not in shown.err and "usage:" not in shown.err


def test_json_of_commands_that_print_figures(folder, capsys) -> None:
    for words in ("model presets", "settings run", "runs ls", "sim --seed 1 --minutes 0.1", "doctor"):
        assert main([*words.split(), "--json"]) in (0, 1)
        assert json.loads(capsys.readouterr().out) is not None, words
