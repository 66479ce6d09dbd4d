"""The program of a rollout engine: SGLang's own server with ROSE's gate, on a Unix socket.

SGLang can only listen on a port, where its routes that abort requests and write weights have no protection against
other users of the machine. So the server is given the path of a socket in a private folder. After its start SGLang
sends a request to its own port, which is not there; that request is left out. Every process that the server starts
imports this module again before anything else, and thereby has the gate, whether or not it finds the entry point.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rose.sglang.plugin import register

register()


def listen_on(path: str) -> None:
    """Make SGLang's HTTP server in this process listen on a Unix socket."""
    import uvicorn

    plain: Any = uvicorn.Config.__init__

    def on_socket(config: Any, *args: Any, **settings: Any) -> None:
        plain(config, *args, **{**settings, "uds": path})

    uvicorn.Config.__init__ = on_socket


def main(arguments: list[str]) -> None:
    """Serve: the first argument is the path of the socket, the others are SGLang's."""
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    listen_on(arguments[0])
    http_server._freeze_gc_after_server_warmup = lambda *_: None
    try:
        run_server(prepare_server_args(arguments[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
