"""What every test runs under: one thread per numeric library, and how hard hypothesis searches.

default   make test         examples without a deadline: a busy machine is not a failure
ci        with CI=true      the same examples every time, so that a red build is about the change
soak      make soak         hours of them
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before numpy is imported: it is read then

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from tests.support.cuda_standin.build import COMPILER, StandIn, build_standin  # noqa: E402

_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=50, **_UNTIMED)
settings.register_profile("ci", max_examples=50, derandomize=True, **_UNTIMED)
settings.register_profile("soak", max_examples=20_000, stateful_step_count=200, **_UNTIMED)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Return the name of a test's parameter of bytes: what gzip makes has the time in it, and workers must agree."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    """Return the stand-in for the CUDA driver, compiled now."""
    if COMPILER is None:
        pytest.skip("the stand-in for the CUDA driver is compiled by gcc, and there is none")
    return StandIn(build_standin(tmp_path_factory.mktemp("standin")))
