"""Parameters that are ignored at the values that change nothing, and refused by name at any other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.openai.readers import LEAST, READERS, refused

IGNORED = [
    (name, param, value)
    for name, reader in READERS.items()
    for param, accepted in reader.ignored.items()
    for value in (None, *accepted)
]


@pytest.mark.parametrize("name, param, value", IGNORED)
def test_ignored_parameters_are_accepted_at_values_that_change_nothing(name: str, param: str, value: Any) -> None:
    body = READERS[name].read(msgspec.json.encode(LEAST[name] | {param: value}))
    assert body == READERS[name].read(msgspec.json.encode(LEAST[name]))


@pytest.mark.parametrize("name, param", sorted({(name, param) for name, param, _ in IGNORED}))
def test_any_other_value_is_refused_by_name(name: str, param: str) -> None:
    detail = refused(name, **{param: {"some": "thing else"}}).body.error
    prefix = "sampling_params." if name == "sampling" else ""
    assert detail.param == prefix + param
    assert detail.code == "unsupported_parameter"


def test_no_parameter_is_both_implemented_and_ignored() -> None:
    for reader in READERS.values():
        assert not set(reader.ignored) & set(reader.kind.__struct_fields__)
