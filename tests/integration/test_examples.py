"""The examples do what they say, against a gateway and a worker started as their readers start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from tests.integration import devices, gateways
from tests.integration.gateways import TOKENS
from tests.integration.torch_ranks import torchrun

from rose.models.presets import write_preset
from rose.train.warmstart import warm_start

ROOT = devices.ROOT
SECRET = {"ROSE_RELAY_SECRET": "a-secret-of-these-tests-and-no-other"}
MARKED_MAX = 5  # lines of ROSE in an example for people who have a trainer
STEPS = 10


def test_an_example_is_short_enough_to_be_read():
    for example in sorted((ROOT / "examples").glob("*.py")):
        assert len(example.read_text().splitlines()) < 80, example.name


def test_the_lines_that_matter_are_few_and_marked():
    for name in ("trl_async_grpo.py", "plain_pytorch_fsdp2.py"):
        example = (ROOT / "examples" / name).read_text()
        assert 3 <= example.partition('"""\n\n')[2].count("(ROSE)") <= MARKED_MAX, name


@pytest.mark.timeout(500)
def test_a_loop_with_fsdp2_publishes_from_both_ranks_and_plays(tmp_path, monkeypatch):
    for name, value in (TOKENS | SECRET).items():
        monkeypatch.setenv(name, value)
    model = write_preset("qwen3-3m", tmp_path / "qwen3-3m", seed=0)
    with gateways.gateway(model) as running, gateways.worker(model, running.url, "a"):
        example = str(ROOT / "examples" / "plain_pytorch_fsdp2.py")
        output = torchrun(2, example, str(model), running.url, str(tmp_path / "relay"), "2")
        assert running.pool()["version"].startswith("2-")
        assert running.members(version=running.pool()["version"]) == ["a"]
    said = re.findall(r"step (\d), rank (\d): reward (\d\.\d\d), pushed (\d+) bytes", output)
    assert {(step, rank) for step, rank, _, _ in said} == {("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")}
    assert all(int(pushed) > 0 for *_, pushed in said)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainer_of_your_own_learns_to_cross_the_lake(tmp_path, capsys):
    model, variables = warm_start(), TOKENS | SECRET
    gateway = devices.start(["-m", "rose", "gateway", str(model), "--port", "0"], model, variables)
    try:
        worker_words = ["-m", "rose", "serve", "--lend", str(model), "--rollout-port", "0", "--gateway", gateway.url]
        worker = devices.start([*worker_words, "--device", f"cpu:{max(os.sched_getaffinity(0))}"], model, variables)
        try:
            arguments = [str(model), gateway.url, str(tmp_path / "relay"), str(STEPS)]
            command = [sys.executable, str(ROOT / "examples" / "own_trainer.py"), *arguments]
            environment = devices.environment() | variables
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, cwd=tmp_path)
        finally:
            devices.end(worker)
    finally:
        devices.end(gateway)
    assert ended.returncode == 0, ended.stderr
    won = [int(share) for share in re.findall(r"(\d+)% of games won", ended.stdout)]
    with capsys.disabled():
        print(f"\ngames won in each step: {', '.join(f'{share}%' for share in won)}")
    assert len(won) == STEPS
    assert sum(won[-3:]) / 3 > sum(won[:3]) / 3 + 15, won
