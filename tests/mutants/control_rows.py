"""Mutants of the control routes of trainers and operators, and of the process that reads trainers' folders."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CONTROL_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "every agent may pause the pool and publish weights",
        "gateway/gateway_service.py",
        "    GatewayRoute(method, path, handler, TRAINERS)\n",
        "    GatewayRoute(method, path, handler, AGENTS)\n",
        ("unit/gateway/test_vllm_control_routes.py",),
    ),
    Mutant(
        "weights are read from any folder",
        "weights/folder_publisher.py",
        "    if not path.is_relative_to(os.path.realpath(root)):",
        "    if False:",
        ("unit/weights/test_folder_publisher.py",),
    ),
    Mutant(
        "a folder may be left by a symbolic link",
        "weights/folder_publisher.py",
        "    path = Path(os.path.realpath(text))",
        "    path = Path(os.path.abspath(text))",
        ("unit/weights/test_folder_publisher.py",),
    ),
    Mutant(
        "a pipe that is named as weights holds up the publisher",
        "weights/folder_publisher.py",
        "            if not stat.S_ISREG(status.st_mode):",
        "            if False:",
        ("unit/weights/test_folder_publisher.py",),
    ),
    Mutant(
        "files that change while they are read are published",
        "weights/folder_publisher.py",
        "        if weight_files(folder, self._spec.root) != state:",
        "        if False:",
        ("unit/weights/test_folder_publisher.py",),
    ),
    Mutant(
        "a late call brings an earlier version back",
        "gateway/vllm_control_routes.py",
        "    if not gateway.core.pool.was_published(version.version):",
        "    if version.version != gateway.core.pool.newest_version:",
        ("unit/gateway/test_vllm_control_routes.py",),
    ),
    Mutant(
        "the process that publishes weights has the tokens of all roles",
        "gateway/publisher_process.py",
        "        environment = without_secrets(os.environ)",
        "        environment = dict(os.environ)",
        ("unit/gateway/test_publisher_process.py",),
    ),
    Mutant(
        "a trainer may order the owner's devices",
        "gateway/gateway_service.py",
        'OWNERS: tuple[Role, ...] = ("operator",)',
        'OWNERS: tuple[Role, ...] = ("operator", "trainer")',
        ("unit/gateway/test_fleet_routes.py",),
    ),
    Mutant(
        "pages of other sites may call the live page's routes",
        "gateway/gateway_service.py",
        "        if callers is not None:",
        "        if False:",
        ("unit/gateway/test_fleet_routes.py",),
    ),
    Mutant(
        "an operator's order is not noted in the ledger",
        "gateway/fleet_controls.py",
        "        self._ledger.set_orders(msgspec.msgpack.encode(self.stored))\n",
        "",
        ("unit/gateway/test_fleet_controls.py", "unit/gateway/test_fleet_routes.py"),
    ),
    Mutant(
        "short frames of a WebSocket are parsed all at once",
        "openai/connections.py",
        "if self._payload_parser is None or not (self._unparsed or len(data) > PARSED_BYTES_AT_ONCE):",
        "if True:",
        ("unit/openai/test_connections.py",),
    ),
)
