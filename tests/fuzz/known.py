"""Findings of the fuzzers whose defect is not repaired yet. Each entry goes with its repair.

A key is a pattern of a finding's signature; the value says where the defect is described.
"""

from __future__ import annotations

import re

KNOWN_OPEN: dict[str, str] = {
    r"loop blocked in src/rose/front/(prompts|context|completions|tally)": "audit 1",
    r"loop blocked in src/rose/(front/bodies|front/information|models/tokenizer)": "audit 19",
    r"loop blocked in .*aiohttp/(http_parser|compression_utils|web_protocol|streams)": "audit 19 (gzip)",
    r"traceback OverflowError in src/rose/rollout/ledger": "audit 7",
    r"no answer within 30 s: POST /v1/chat/completions": "audit 7",
    r"no answer within 30 s: POST /inference/v1/generate": "audit 7: turns of a trajectory behind the one that hangs",
    r"traceback (OverflowError|sqlite3\.\S+) in src/rose/rollout/ledger_file": "audit 5",
    r"processes ended or began": "audit 5",
    r"traceback OverflowError in src/rose/rollout/trainer_routes": "audit 6",
    r"memory grew in rose gateway": "audit 10",
    r"honest client.*(outside the vocabulary|more tokens|no numbers|no tokens)": "audit 15",
    r"traceback AssertionError in src/rose/rollout/produced": "audit 15",
    r"traceback UnicodeEncodeError": "audit 21",
    r"traceback ValueError in src/rose/weights/metrics": "audit 22",
    r"traceback UnicodeDecodeError": "audit 28",
    r"traceback RecursionError in src/rose/(rollout/messages|weights/relay/wire)": "found by this fuzzer",
    r"loop blocked in src/rose/(rollout|core)/": "found by this fuzzer: a worker's frame of many messages",
}


def why(signature: str) -> str | None:
    """Return why this finding is expected, or None if it is not."""
    return next((reason for pattern, reason in KNOWN_OPEN.items() if re.search(pattern, signature)), None)
