"""Mutants of what clients and trainers of other projects rely on: keys, demands for weights, tokens."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CLIENT_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "an API key counts beside another header",
        "openai/access.py",
        "    if header is not None:",
        "    if header is not None and API_KEY_HEADER not in request.headers:",
        ("unit/openai/test_access.py",),
    ),
    Mutant(
        "one token may be another with a session",
        "openai/access.py",
        'if f"{token}/".startswith(f"{other}/") or f"{other}/".startswith(f"{token}/"):',
        "if False:",
        ("unit/openai/test_access.py",),
    ),
    Mutant(
        "the user of HTTP Basic may be the token",
        "api/authorization.py",
        'return base64.b64decode(key, validate=True).partition(b":")[2]',
        'return base64.b64decode(key, validate=True).strip(b":")',
        ("unit/openai/test_access.py",),
    ),
    Mutant(
        "any key with a session is accepted",
        "gateway/auth.py",
        'hmac.compare_digest(key[: len(secret) + 1], secret + b"/")',
        'b"/" in key',
        ("unit/gateway/test_auth.py",),
    ),
    Mutant(
        "workers and operators may name a session in their key",
        "gateway/auth.py",
        " and role in WITH_SESSION",
        "",
        ("unit/gateway/test_auth.py",),
    ),
    Mutant(
        "a session in the path or the key may have any length",
        "gateway/turn_routes.py",
        "        if len(name) > SESSION_CHARACTERS_MAX:",
        "        if False:",
        ("unit/gateway/test_turn_routes.py",),
    ),
    Mutant(
        "a worker's log-probabilities of a prompt are believed as they come",
        "gateway/turn_state.py",
        "elif piece.prompt_logprobs and not _fits_prompt(piece.prompt_logprobs, turn, vocabulary):",
        "elif False:",
        ("unit/gateway/test_turn_scheduler.py",),
    ),
    Mutant(
        "tokens of weights that a turn does not want are kept",
        "gateway/turn_scheduler.py",
        "elif piece.token_ids and not self._pool.allows(turn.request.sampling, piece.version):",
        "elif False:",
        ("unit/gateway/test_turn_scheduler.py",),
    ),
    Mutant(
        "turns whose weights nothing runs hold back other turns with demands",
        "gateway/turn_scheduler.py",
        "            if decision is NO_VERSION:\n",
        "            if False:\n",
        ("property/test_version_demand.py",),
    ),
    Mutant(
        "turns that demand the weights of a full worker hold back the others",
        "gateway/turn_scheduler.py",
        "heapq.heappush(self._queue_demanding if turn.request.sampling.demands_version else queue, entry)",
        "heapq.heappush(queue, entry)",
        ("unit/gateway/test_turn_scheduler.py",),
    ),
    Mutant(
        "log-probabilities of prompts are kept without a bound",
        "gateway/sessions.py",
        "self.room.check(self.size_bytes, TOKEN_BYTES * len(prompt_ids) + scores_bytes)",
        "self.room.check(self.size_bytes, TOKEN_BYTES * len(prompt_ids))",
        ("unit/gateway/test_sessions.py",),
    ),
    Mutant(
        "a response lists as many log-probabilities of prompts as a client likes",
        "openai/prompts.py",
        "    if entries > PROMPT_LOGPROBS_MAX:",
        "    if False:",
        ("unit/openai/test_released_shapes.py",),
    ),
    # Trainers of other frameworks
    Mutant(
        "tokens that were not played are trained on",
        "adapters/trl.py",
        "came.get((member.trajectory_id, member.token_ids))",
        "next((it for (name, _), it in came.items() if name == member.trajectory_id), None)",
        ("unit/adapters/test_trl.py",),
    ),
)
