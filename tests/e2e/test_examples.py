"""The examples do what they say, against a gateway and a worker started as their readers start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from tests.e2e import devices
from tests.e2e.gateways import TOKENS

from rose.train.warmstart import warm_start

ROOT = devices.ROOT
SECRET = {"ROSE_RELAY_SECRET": "a-secret-of-these-tests-and-no-other"}
STEPS = 10


def test_an_example_is_short_enough_to_be_read():
    for example in sorted((ROOT / "examples").glob("*.py")):
        assert len(example.read_text().splitlines()) < 80, example.name


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
