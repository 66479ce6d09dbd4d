"""A process that borrows pages of a KV pool, as a rollout engine does, for the steps that stop or kill one.

    python -m rose.verify.pool_borrower FOLDER DEVICE

It joins the pool, says how many pages there are and how long joining took, and then obeys lines: `take N` puts pages
behind N more places, `give N` gives so many back, and `fill N` writes a pattern into so many. Each answer is the number
of pages that it holds. It ends when its input does.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from pathlib import Path

from rose.device.kv_pool.exchange import join_pool
from rose.device.kv_pool.pool_share import PoolShare
from rose.verify.page_contents import PageContents
from rose.vllm.engine_process import PR_SET_PDEATHSIG


def main(folder: str, device: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    began_s = time.monotonic()
    ledger, backend = join_pool(Path(folder), device=int(device))
    share = PoolShare(ledger, backend, ledger.pages)
    print(f"joined {ledger.pages} {time.monotonic() - began_s:.6f}", flush=True)
    for line in sys.stdin:
        action, _, count = line.partition(" ")
        places = [place for place in range(share.places) if share.has(place) is (action != "take")][: int(count)]
        if action == "take":
            share.acquire(places)
        elif action == "give":
            share.give_back(places)
        elif action == "fill":
            contents = PageContents(backend.kind, int(device))
            for place in places:
                contents.fill(share.address + place * share.page_bytes, share.page_bytes)
        print(f"holds {share.held}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
