"""The mutants: security and durability checks, each taken out by one change of text.

A row names the file, the exact text that stands there once, what replaces it, and the tests that must notice. When a
source file changes, correct the old text here: a text that is not found exactly once is a failure of the run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # below src/rose
    old: str
    new: str
    tests: tuple[str, ...]  # files or node ids below tests; the first failure ends the mutant's run
    only: str = ""  # expression for pytest -k


MUTANTS: tuple[Mutant, ...] = (
    # Tokens and roles
    Mutant(
        "any bearer token is accepted",
        "front/tokens.py",
        'kind.lower() != "bearer" or not hmac.compare_digest(sent, token.encode())',
        'kind.lower() != "bearer"',
        ("unit/test_front_tokens.py",),
    ),
    Mutant(
        "any role may use any route",
        "rollout/roles.py",
        "for secret in _secrets(tokens, allowed):",
        "for secret in _secrets(tokens, ROLES):",
        ("unit/test_gateway_words.py", "e2e/test_openai_gateway.py", "e2e/test_gateway.py"),
    ),
    Mutant(
        "the listener for rollouts accepts any user",
        "coserve/door.py",
        "if _uid_of(connection) == os.getuid():",
        "if True:",
        ("unit/test_guards.py",),
    ),
    # Weights
    Mutant(
        "a record with a wrong seal is read",
        "weights/manifest.py",
        "if not hmac.compare_digest(data[len(MAGIC) : len(MAGIC) + SEAL_BYTES], _seal_of(secret, key, body)):",
        "if False:",
        ("unit/test_weights_chain.py",),
    ),
    Mutant(
        "the hash of a payload is not checked",
        "weights/reading.py",
        "return payload_hash(_payload(range_, box, data)) == range_.source.pieces[box].payload_hash",
        "return True",
        ("unit/test_weights_chain.py", "unit/test_weights_receive.py", "unit/test_weights_trouble.py"),
    ),
    Mutant(
        "the hash of the decoded numbers is not checked",
        "weights/reading.py",
        "if shadow.hash_of(box) != goal.pieces[box].content_hash:",
        "if False:",
        ("unit/test_weights_chain.py", "unit/test_weights_receive.py", "unit/test_weights_trouble.py"),
    ),
    Mutant(
        "a trainer that was replaced goes on publishing",
        "weights/writing.py",
        "if not is_ours or any(self._owner_of(epoch) is not None for epoch in claimed if epoch > self.epoch):",
        "if False:",
        ("unit/test_weights_chain.py", "unit/test_weights_publish.py"),
    ),
    # Relay
    Mutant(
        "the relay does not check the client's proof",
        "weights/relay/wire.py",
        'if not hmac.compare_digest(_read_exactly(plain, DIGEST_BYTES), _proof(secret, b"client", both)):',
        "if not _read_exactly(plain, DIGEST_BYTES):",
        ("unit/test_relay_tcp.py",),
    ),
    Mutant(
        "the seal of a relay message is not checked",
        "weights/relay/wire.py",
        "if not hmac.compare_digest(head[LENGTH_BYTES:], self._tag(self._labels[1], self._received, body)):",
        "if False:",
        ("unit/test_guards.py", "unit/test_relay_tcp.py"),
    ),
    Mutant(
        "a relay message can be replayed",
        "weights/relay/wire.py",
        'return hmac.digest(self._session_key, label + number.to_bytes(8, "little") + body, "sha256")',
        'return hmac.digest(self._session_key, label + body, "sha256")',
        ("unit/test_guards.py", "unit/test_relay_tcp.py"),
    ),
    Mutant(
        "any text is a key of a relay",
        "weights/relay/base.py",
        "if len(key) > KEY_CHARACTERS_MAX or not _KEY.fullmatch(key):",
        "if len(key) > KEY_CHARACTERS_MAX:",
        ("contract/test_relay.py",),
        "filesystem",
    ),
    Mutant(
        "a value in a relay can be overwritten",
        "weights/relay/filesystem.py",
        "os.link(temporary, path)",
        "os.replace(temporary, path)",
        ("unit/test_guards.py", "unit/test_relay_filesystem.py"),
    ),
    Mutant(
        "a relay does not wait for the disk",
        "weights/relay/filesystem.py",
        "os.fsync(file)",
        "pass",
        ("unit/test_guards.py",),
    ),
    # Workers
    Mutant(
        "the lease of a silent worker does not end",
        "rollout/pool.py",
        "return [member for member in self._members.values() if now_s > member.lease_until_s]",
        "return []",
        ("unit/test_rollout_pool.py", "unit/test_rollout_failures.py", "unit/test_rollout_scheduler.py"),
    ),
    Mutant(
        "another worker's attempt id is accepted",
        "rollout/scheduler.py",
        "return turn if turn is not None and turn.member is member else None",
        "return turn",
        ("unit/test_guards.py",),
    ),
    Mutant(
        "a worker with other weights is given turns",
        "rollout/pool.py",
        "return known is not None and bool(known.hash) and known.hash != member.hash",
        "return False",
        ("unit/test_rollout_proof.py",),
    ),
    # Connections
    Mutant(
        "any number of connections is accepted",
        "front/connections.py",
        "if len(self._server.connections) >= self._most:",
        "if False:",
        ("e2e/test_lifecycle.py",),
        "too_many_connections",
    ),
    Mutant(
        "a silent connection is never closed",
        "front/connections.py",
        'if not transport.is_closing() and getattr(transport.get_protocol(), "_request_count", 1) == 0:',
        "if False:",
        ("e2e/test_lifecycle.py",),
        "never_says",
    ),
    Mutant(
        "a client that does not read its stream is never cut off",
        "front/events.py",
        "async with asyncio.timeout(self._slow_reader_s):",
        "async with asyncio.timeout(None):",
        ("e2e/test_lifecycle.py",),
        "reader_that_sleeps",
    ),
    Mutant(
        "chat templates run outside the sandbox",
        "models/chat.py",
        "environment = ImmutableSandboxedEnvironment(",
        "environment = jinja2.Environment(  # type: ignore",
        ("unit/test_models_tokenizer.py",),
    ),
    # Ledger
    Mutant(
        "an answer is sent before it is durable",
        "rollout/ledger_file.py",
        "        if not self.has_work:\n            told(None)\n            return\n",
        "        told(None)\n        return\n",
        ("unit/test_ledger.py", "property/test_ledger.py"),
    ),
    Mutant(
        "two gateways may use one ledger",
        "rollout/ledger_file.py",
        "fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        ("unit/test_ledger.py",),
    ),
    # File modes
    Mutant(
        "every user may read the ledger",
        "rollout/ledger_file.py",
        "os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))",
        "os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))",
        ("unit/test_guards.py",),
    ),
    Mutant(
        "every user may read the gateway's tokens",
        "rollout/roles.py",
        "os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)",
        "os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)",
        ("unit/test_guards.py",),
    ),
    Mutant(
        "every user may read the device's tokens",
        "front/devices.py",
        "os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)",
        "os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)",
        ("unit/test_guards.py",),
    ),
    Mutant(
        "every user may read the run's secret",
        "launch/publishing.py",
        'folder.write(SECRET_NAME, made + "\\n", mode=0o600)',
        'folder.write(SECRET_NAME, made + "\\n", mode=0o644)',
        ("unit/test_guards.py",),
    ),
)
