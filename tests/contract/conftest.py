from __future__ import annotations

import pytest
from tests.contract.kinds import EngineKind, embedded_kind, simulated_kind


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory):
    """Two tiny models of one shape: the weights to begin with, and the ones to swap to."""
    from rose.models.presets import write_preset

    folders = [tmp_path_factory.mktemp("models") / name for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        write_preset("qwen3-3m", folder, seed=seed)
    return folders


@pytest.fixture(scope="session", params=["simulated", "embedded"])
def kind(request: pytest.FixtureRequest) -> EngineKind:
    if request.param == "simulated":
        return simulated_kind()
    return embedded_kind(*request.getfixturevalue("model_folders"))
