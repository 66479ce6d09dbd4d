"""The status segment of a server is found by its port, in a folder that belongs to its user."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.unit.vllm.test_status_segment import header

from rose.errors import ConfigError, Unavailable
from rose.vllm import discovery
from rose.vllm.discovery import FOLDER_VARIABLE, own_folder
from rose.vllm.status_segment import SegmentWriter


def test_own_folder_is_closed_to_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "new" / "boards"))
    assert own_folder().stat().st_mode & 0o077 == 0


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rose-") as folder:  # a socket's path is short
        monkeypatch.setenv(discovery.FOLDER_VARIABLE, f"{folder}/boards")
        yield Path(folder) / "boards"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_folder_that_is_a_link_or_a_file_is_refused(boards: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    if kind == "link":
        boards.symlink_to(tmp_path / "elsewhere")
    else:
        boards.touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        discovery.own_folder()


def test_a_folder_that_others_may_enter_is_closed(boards: Path) -> None:
    boards.mkdir(mode=0o777)
    boards.chmod(0o777)
    assert stat.S_IMODE(discovery.own_folder().stat().st_mode) == 0o700


def test_the_segment_of_a_server_is_found_by_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setenv(discovery.FOLDER_VARIABLE, str(tmp_path / "boards"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match="publishes no status segment"):
            discovery.find_segment(url)
        path = discovery.new_segment_path()
        writer = SegmentWriter(path, header())
        assert discovery.find_segment(url) == path
        writer.close()
    with pytest.raises(Unavailable, match="no server listens"):
        discovery.find_segment(url)


def test_a_segment_is_not_live_by_another_process_of_the_same_id(tmp_path: Path) -> None:
    path = tmp_path / "any.board"
    SegmentWriter(path, header())
    assert discovery.is_live(path)
    SegmentWriter(path, header(started=1))
    assert not discovery.is_live(path)
    path.unlink()
    assert not discovery.is_live(path)


def test_segments_of_dead_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(discovery.FOLDER_VARIABLE, str(tmp_path))
    namespace = discovery.own_name().partition("-")[0]
    board, desk = tmp_path / f"{namespace}-999999999.board", tmp_path / f"desk-{namespace}-999999999-a_1"
    pool = tmp_path / f"pool-{namespace}-999999999"
    living, others = tmp_path / f"desk-{discovery.own_name()}-a_1", tmp_path / "1-999999999.board"
    for path in (board, others):
        path.write_bytes(b"")
    for path in (desk, living, pool):
        (path / "inside").mkdir(parents=True)
    assert discovery.new_segment_path() == tmp_path / f"{namespace}-{os.getpid()}.board"
    assert discovery.new_pool_folder() == tmp_path / f"pool-{discovery.own_name()}"
    assert sorted(tmp_path.iterdir()) == sorted([living, others]), "who lives in another container cannot be told"
    assert discovery.live_segments() == []


def test_a_segment_of_another_container_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(discovery.FOLDER_VARIABLE, str(tmp_path))
    SegmentWriter(tmp_path / f"1-{os.getpid()}.board", header())
    assert discovery.live_segments() == []
    SegmentWriter(discovery.new_segment_path(), header())
    assert len(discovery.live_segments()) == 1


def test_a_server_of_several_engines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setenv(discovery.FOLDER_VARIABLE, str(tmp_path))
    first = discovery.new_segment_path()
    with socket.create_server(("127.0.0.1", 0)) as server:
        for path in (first, first.with_stem(f"{first.stem}0")):
            SegmentWriter(path, header())
        with pytest.raises(ConfigError, match="2 engines"):
            discovery.find_segment(f"http://127.0.0.1:{server.getsockname()[1]}")


def test_a_replica_of_a_server_is_found_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(discovery.FOLDER_VARIABLE, str(tmp_path))
    first = discovery.new_segment_path()
    second, third = first.with_stem(f"{first.stem}0"), first.with_stem(f"{first.stem}1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        SegmentWriter(first, header())
        SegmentWriter(second, replace(header(), replica=1))
        SegmentWriter(third, replace(header(), replica=2, is_lockstep=True))
        assert discovery.find_segment(url, 1) == second
        with pytest.raises(ConfigError) as refused:
            discovery.find_segment(url, 3)
        assert refused.value.hint is not None and "0, 1, 2" in refused.value.hint
        with pytest.raises(ConfigError, match="share every step"):
            discovery.find_segment(url, 2)


@pytest.mark.parametrize("url, port", [("http://a:8000/v1", 8000), ("http://a", 80), ("https://a", 443)])
def test_a_url_without_a_port_has_the_usual_one(url: str, port: int) -> None:
    assert discovery.port_of(url) == port
