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
        "if not hmac.compare_digest(bearer_of(request), token.encode()):",
        "if not bearer_of(request):",
        (
            "unit/test_front_tokens.py",
            "unit/test_front_http.py",
        ),
    ),
    Mutant(
        "any role may use any route",
        "rollout/roles.py",
        "for role, secret in zip(allowed, _secrets(tokens, allowed)):",
        "for role, secret in zip(ROLES, _secrets(tokens, ROLES)):",
        (
            "unit/test_gateway_words.py",
            "e2e/test_gateway.py",
        ),
    ),
    Mutant(
        "two roles may share a token",
        "front/tokens.py",
        "        if token in known:",
        "        if False:",
        (
            "unit/test_gateway_tokens.py",
            "unit/test_front_tokens.py",
        ),
    ),
    Mutant(
        "an agent may act on any trajectory",
        "rollout/trajectories.py",
        "if session is not None and is_trusted:",
        "if session is not None:",
        ("unit/test_gateway_hostile.py",),
    ),
    Mutant(
        "the secret of a trajectory is not compared",
        "rollout/sessions.py",
        "return session.secret is not None and hmac.compare_digest(session.secret.encode(), given)",
        "return session.secret is not None",
        ("unit/test_gateway_hostile.py",),
    ),
    Mutant(
        "a session takes the place of a trajectory that is begun later",
        "rollout/sessions.py",
        'return trajectory_id if is_begun else f"\\0{trajectory_id}"',
        "return trajectory_id",
        ("unit/test_gateway_hostile.py",),
    ),
    Mutant(
        "an agent may push its turns before others",
        "rollout/turn_routes.py",
        "return wanted if is_trusted(request) else max(0, wanted)",
        "return wanted",
        ("unit/test_gateway_hostile.py",),
    ),
    Mutant(
        "the listener for rollouts accepts any user",
        "coserve/door.py",
        "if _uid_of(connection) == os.getuid():",
        "if True:",
        ("unit/test_rollout_listener.py",),
    ),
    Mutant(
        "an engine inherits the secrets of its front",
        "coserve/channel.py",
        "without_secrets(os.environ)",
        "os.environ",
        ("e2e/test_lent_process.py",),
    ),
    # Weights
    Mutant(
        "a record with a wrong signature is read",
        "weights/manifest.py",
        "if not read_key(secret).is_signed(signature, _signed(key, hashed)):",
        "if False:",
        (
            "unit/test_weights_chain.py",
            "unit/test_weights_keys.py",
            "unit/test_weights_claims.py",
        ),
    ),
    Mutant(
        "a record whose bytes were changed is read",
        "weights/manifest.py",
        "if not hmac.compare_digest(hashlib.sha256(body).digest(), hashed):",
        "if False:",
        (
            "unit/test_weights_chain.py",
            "unit/test_weights_keys.py",
            "unit/test_weights_claims.py",
        ),
    ),
    Mutant(
        "the hash of a payload is not checked",
        "weights/reading.py",
        "return payload_hash(_payload(range_, box, data)) == range_.source.pieces[box].payload_hash",
        "return True",
        (
            "unit/test_weights_chain.py",
            "unit/test_weights_receive.py",
            "unit/test_weights_trouble.py",
        ),
    ),
    Mutant(
        "the hash of the decoded numbers is not checked",
        "weights/reading.py",
        "if shadow.hash_of(box) != goal.pieces[box].content_hash:",
        "if False:",
        (
            "unit/test_weights_chain.py",
            "unit/test_weights_receive.py",
            "unit/test_weights_trouble.py",
        ),
    ),
    Mutant(
        "a trainer that was replaced goes on publishing",
        "weights/writing.py",
        "if not is_ours or any(self._stands(claim) for claim in self._claims(sizes, above=self.epoch)):",
        "if False:",
        (
            "unit/test_weights_chain.py",
            "unit/test_weights_publish.py",
        ),
    ),
    Mutant(
        "a claim far ahead of the clock counts",
        "weights/chain.py",
        "return epoch > unix_s + CLAIM_AHEAD_S_MAX",
        "return False",
        ("unit/test_weights_claims.py",),
    ),
    Mutant(
        "weights of a living process are removed",
        "weights/slots.py",
        "            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "            pass\n",
        ("unit/test_weights_slots.py",),
    ),
    # Relay
    Mutant(
        "the relay does not check the client's proof",
        "weights/relay/wire.py",
        'if not hmac.compare_digest(_read_before(plain, DIGEST_BYTES, until_s), _proof(keys[role], b"client", both)):',
        "if not _read_before(plain, DIGEST_BYTES, until_s):",
        ("unit/test_relay_tcp.py",),
    ),
    Mutant(
        "a reader may write to the relay",
        "weights/relay/server.py",
        'if role != "writer" and isinstance(request, wire.Put | wire.Delete):',
        "if False:",
        (
            "unit/test_relay_strangers.py",
            "unit/test_weights_keys.py",
            "contract/test_relay.py",
        ),
    ),
    Mutant(
        "the HMAC of a relay message is not checked",
        "weights/relay/wire.py",
        "if not hmac.compare_digest(head[LENGTH_BYTES:], self._tag(self._labels[1], self._received, body)):",
        "if False:",
        ("unit/test_relay_strangers.py",),
    ),
    Mutant(
        "a relay message can be replayed",
        "weights/relay/wire.py",
        'return hmac.digest(self._session_key, label + number.to_bytes(8, "little") + body, "sha256")',
        'return hmac.digest(self._session_key, label + body, "sha256")',
        ("unit/test_relay_strangers.py",),
    ),
    Mutant(
        "a stranger keeps its place by sending byte by byte",
        "weights/relay/wire.py",
        "        plain.settimeout(_left_s(until_s))\n        ",
        "        plain.settimeout(WELCOME_S)\n        ",
        ("unit/test_relay_strangers.py",),
    ),
    Mutant(
        "any text is a key of a relay",
        "weights/relay/base.py",
        "return len(key) <= KEY_CHARACTERS_MAX and _KEY.fullmatch(key) is not None",
        "return len(key) <= KEY_CHARACTERS_MAX",
        ("contract/test_relay.py",),
        "filesystem",
    ),
    Mutant(
        "a value in a relay can be overwritten",
        "weights/relay/filesystem.py",
        "os.link(temporary, path)",
        "os.replace(temporary, path)",
        ("unit/test_relay_filesystem.py",),
    ),
    Mutant(
        "a relay does not wait for the disk",
        "weights/relay/filesystem.py",
        "os.fsync(file)",
        "pass",
        ("unit/test_relay_filesystem.py",),
    ),
    # Workers
    Mutant(
        "the lease of a silent worker does not end",
        "rollout/pool.py",
        "return [member for member in self._members.values() if now_s > member.lease_until_s]",
        "return []",
        (
            "unit/test_rollout_pool.py",
            "unit/test_rollout_failures.py",
            "unit/test_rollout_scheduler.py",
        ),
    ),
    Mutant(
        "another worker's attempt id is accepted",
        "rollout/scheduler.py",
        "return turn if turn is not None and turn.member is member else None",
        "return turn",
        ("unit/test_gateway_hostile.py",),
    ),
    Mutant(
        "a worker's tokens are believed as they come",
        "rollout/scheduler.py",
        "        self._check(turn, piece)\n",
        "",
        ("unit/test_gateway_hostile.py",),
    ),
    Mutant(
        "a log-probability that is no number is sent on",
        "rollout/runner.py",
        "if not LOWEST <= logprob <= LOG_PROBABILITY_MAX:",
        "if False:",
        ("unit/test_agent_hostile.py",),
    ),
    Mutant(
        "a worker with other weights is given turns",
        "rollout/pool.py",
        "return known is not None and bool(known.hash) and known.hash != member.hash",
        "return False",
        ("unit/test_rollout_proof.py",),
    ),
    Mutant(
        "all messages of a frame are heard at once",
        "rollout/joining.py",
        "                    work = 0\n                    await asyncio.sleep(0)\n",
        "                    work = 0\n",
        (
            "unit/test_gateway_hostile.py",
            "unit/test_loop_blocks.py",
        ),
    ),
    # Connections and bodies
    Mutant(
        "any number of connections is accepted",
        "front/connections.py",
        "if len(self._open) >= self.most:",
        "if False:",
        (
            "unit/test_front_http.py",
            "e2e/test_lifecycle.py",
        ),
    ),
    Mutant(
        "a silent connection is never closed",
        "front/connections.py",
        "        if self._request_count == 0:\n            self.cut()\n",
        "        return\n",
        ("unit/test_front_connections.py", "e2e/test_lifecycle.py"),
    ),
    Mutant(
        "a client that does not read is never cut off",
        "front/connections.py",
        "        if self.unsent_bytes >= self._left_bytes:\n            self.cut()\n            return\n",
        "",
        (
            "unit/test_front_http.py",
            "e2e/test_lifecycle.py",
        ),
    ),
    Mutant(
        "a web page may call a server on loopback",
        "front/callers.py",
        'if not self._is_open and not self._knows(_name_of(f"//{host}")):',
        "if False:",
        ("unit/test_front_http.py",),
    ),
    Mutant(
        "users choose their own priority",
        "front/context.py",
        "return wanted or 0 if self.settings.obey_priority else 0",
        "return wanted or 0",
        (
            "unit/test_front_http.py",
            "unit/test_front_generation.py",
            "unit/test_scheduler_priority.py",
        ),
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
        (
            "unit/test_ledger.py",
            "property/test_ledger.py",
        ),
    ),
    Mutant(
        "two gateways may use one ledger",
        "rollout/ledger_file.py",
        "fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        ("unit/test_ledger.py",),
    ),
    Mutant(
        "a number that SQLite cannot hold is noted",
        "rollout/ledger_file.py",
        "if not -INT64_MAX <= value <= INT64_MAX:",
        "if False:",
        ("unit/test_ledger_weeks.py",),
    ),
    Mutant(
        "a failed write leaves its transaction open",
        "rollout/ledger_file.py",
        '                    database.execute("ROLLBACK")\n',
        "                    pass\n",
        ("unit/test_ledger_weeks.py",),
    ),
    Mutant(
        "the write-ahead log is never cut",
        "rollout/ledger_file.py",
        '            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()\n',
        "",
        ("unit/test_ledger_weeks.py",),
    ),
    Mutant(
        "a row of the log has no bound",
        "rollout/turn_log.py",
        " or len(self._entries) + len(data) > ROW_BYTES",
        "",
        ("unit/test_ledger_weeks.py",),
    ),
    Mutant(
        "a refused turn is kept",
        "rollout/books.py",
        "            turn.give_up()\n",
        "            turn.is_running = False\n",
        (
            "unit/test_ledger_weeks.py",
            "property/test_ledger.py",
        ),
    ),
    Mutant(
        "a trajectory that was handed out may be played again",
        "rollout/trajectories.py",
        "if self._ledger.has_ended(trajectory_id):",
        "if False:",
        ("unit/test_ledger_weeks.py",),
    ),
    Mutant(
        "a trainer ahead of the gateway loses a batch",
        "rollout/trajectories.py",
        "if after > self._batch_number:",
        "if False:",
        ("unit/test_ledger_weeks.py",),
    ),
    Mutant(
        "what agents make the gateway keep has no bound",
        "rollout/room.py",
        "if self.used_bytes + more_bytes > self._most:",
        "if False:",
        ("unit/test_ledger_weeks.py",),
    ),
    # File modes
    Mutant(
        "every user may read the ledger",
        "rollout/ledger_file.py",
        "os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))",
        "os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))",
        ("unit/test_ledger_weeks.py",),
    ),
    Mutant(
        "every user may read tokens and secrets",
        "private_files.py",
        "FILE_MODE = 0o600",
        "FILE_MODE = 0o644",
        ("unit/test_private_files.py",),
    ),
    Mutant(
        "the tokens of gateways and devices are written for every user",
        "front/registry.py",
        "        write_private(path, content)\n",
        "        path.write_bytes(content)\n",
        (
            "unit/test_front_registry.py",
            "unit/test_gateway_tokens.py",
        ),
    ),
    Mutant(
        "every user may read the run's secret",
        "launch/publishing.py",
        'write_private(kept, made + b"\\n")',
        'kept.write_bytes(made + b"\\n")',
        ("unit/test_weights_keys.py",),
    ),
    Mutant(
        "a private file is not synced before it is renamed",
        "private_files.py",
        "            os.fsync(file.fileno())\n",
        "",
        ("unit/test_private_files.py",),
    ),
)
