"""Addresses, certificates and errors of the relay interface."""

from __future__ import annotations

import pytest
from tests.contract.relays import SECRET

from rose.errors import ConfigError
from rose.weights.relay.relay_api import client_tls, server_tls
from rose.weights.relay.relay_client import HttpRelay


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:99999", "host:port"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="not an address"):
        HttpRelay(address, SECRET)


def test_certificates_that_are_none_are_told(tmp_path):
    with pytest.raises(ConfigError, match="cannot use"):
        server_tls(str(tmp_path / "none"), str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be used"):
        client_tls(str(tmp_path / "none"))
